"""An agent fits a small board: little memory, and nothing heavy imported."""

import json
import signal
from pathlib import Path

import pytest

from edgeasync import nn
from tests.support.processes import trained

pytestmark = pytest.mark.process

RESIDENT_BYTES_MAX = 64 << 20
RESIDENT_BYTES_MAX_GRAPH = 100 << 20
"""With onnxruntime, which takes 20 MiB before it has done anything, and tensors of 9 MiB."""
LENET = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)  # fmt: skip
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


def resident_bytes(pid):
    """Return the most memory that a process has had at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line.split() for line in lines if line.startswith("VmHWM:"))
    assert peak[2] == "kB"
    return int(peak[1]) * 1024


known_peak = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the kernel does not tell the peak of memory"
)


@known_peak
def test_an_agent_with_the_numpy_trainer_takes_little_memory(commands):
    _, address = commands.hub(commands.settings(model='kind = "mlp"\ninputs = 64\nhidden = [64]\nclasses = 10'))
    data = commands.data("digits.npz", examples=2000, inputs=64, classes=10)
    agent = commands.agent(address, "small", data=data, step_s=0.0)
    trained(address, 200, "small")
    assert resident_bytes(agent.pid) <= RESIDENT_BYTES_MAX


@known_peak
def test_an_agent_that_trains_a_convolutional_network_takes_little_memory(commands):
    nn.save(LENET, commands.folder / "lenet.onnx", (1, 28, 28))
    hub = commands.start("hub", "--model", "lenet.onnx", "--bind", "tcp://127.0.0.1:*", "--run", "run", "--json")
    address = hub.wait_for("listening")["detail"]
    data = commands.data("digits.npz", examples=256, inputs=28 * 28, classes=10)
    program = REPORT_MODULES + "from edgeasync.cli.main import main; main()"
    agent = commands.agent(address, "small", data=data, step_s=0.0, program=("-c", program))
    status = trained(address, 100, "small")
    assert status["parameters"] == 61_706
    assert resident_bytes(agent.pid) <= RESIDENT_BYTES_MAX_GRAPH
    agent.signal(signal.SIGTERM)
    modules = modules_of(agent)
    assert "onnxruntime" in modules
    assert not modules.intersection(HEAVY)


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
            program=(
                "-c",
                REPORT_MODULES
                + "import edgeasync as e; [getattr(e, n) for n in set(e.__all__) - {'OnnxTrainer'}]; report(0)",
            )
        )
    )
    assert {"edgeasync", "numpy", "zmq"} <= modules
    assert not modules.intersection([*HEAVY, "onnxruntime", "typer", "rich"])
