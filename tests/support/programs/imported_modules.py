"""What a process has imported when it ends."""

HEAVY = [
    *("matplotlib", "onnx", "pandas", "prometheus_client", "scipy", "sklearn", "starlette", "torch", "uvicorn"),
]

REPORT_MODULES = """
import os, sys

def report(code, leave=os._exit):
    print(*sorted({name.partition(".")[0] for name in sys.modules}), flush=True)
    leave(code)

os._exit = report  # the way the command leaves
"""


def modules_of(command):
    assert command.wait() == 0, str(command)
    return set(command.lines[-1].split())
