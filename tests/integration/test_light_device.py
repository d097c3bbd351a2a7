"""An agent fits a small board: little memory, and nothing heavy imported."""

import json
from pathlib import Path

import pytest

from tests.integration.processes import trained

pytestmark = pytest.mark.process

RESIDENT_BYTES_MAX = 64 << 20
HEAVY = ["matplotlib", "onnx", "pandas", "scipy", "sklearn", "torch"]

REPORT_MODULES = """
import json, os, sys

def report(code, leave=os._exit):
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), flush=True)
    leave(code)

os._exit = report  # the way the command leaves
"""


def modules_of(command):
    assert command.wait() == 0, str(command)
    return set(json.loads(command.lines[-1]))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell the peak of memory")
def test_an_agent_with_the_numpy_trainer_takes_little_memory(commands):
    _, address = commands.hub(commands.settings(model='kind = "mlp"\ninputs = 64\nhidden = [64]\nclasses = 10'))
    data = commands.data("digits.npz", examples=2000, inputs=64, classes=10)
    agent = commands.agent(address, "small", data=data, step_s=0.0)
    trained(address, 200, "small")
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (peak,) = (line.split() for line in lines if line.startswith("VmHWM:"))
    assert peak[2] == "kB"
    assert int(peak[1]) * 1024 <= RESIDENT_BYTES_MAX


def test_an_agent_that_has_trained_imported_nothing_heavy(commands):
    _, address = commands.hub(commands.settings(hub="stop = { updates = 20 }"))
    program = REPORT_MODULES + "from edgeasync.cli.main import main; main()"
    agent = commands.agent(address, "small", program=("-c", program))
    modules = modules_of(agent)
    assert agent.wait_for("stopped")["steps"] >= 16
    assert {"edgeasync", "numpy", "zmq"} <= modules
    assert not modules.intersection(HEAVY)


def test_importing_edgeasync_imports_nothing_heavy(commands):
    modules = modules_of(
        commands.start(
            program=("-c", REPORT_MODULES + "import edgeasync as e; [getattr(e, n) for n in e.__all__]; report(0)")
        )
    )
    assert {"edgeasync", "numpy", "zmq"} <= modules
    assert not modules.intersection([*HEAVY, "onnxruntime", "typer", "rich"])
