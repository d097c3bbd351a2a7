"""An agent fits a small board: nothing heavy is imported. `benchmarks.device_memory` has its memory."""

import signal

import pytest

from edgeasync import nn
from tests.support.models.graphs import LENET
from tests.support.programs.imported_modules import HEAVY, REPORT_MODULES, modules_of
from tests.support.programs.processes import trained

pytestmark = pytest.mark.process


def test_an_agent_that_has_trained_a_convolutional_network_imported_nothing_heavy(commands):
    nn.save(LENET, commands.folder / "lenet.onnx", (1, 28, 28))
    hub = commands.start("hub", "--model", "lenet.onnx", "--bind", "tcp://127.0.0.1:*", "--run", "run", "--json")
    address = hub.wait_for("listening")["detail"]
    data = commands.data("digits.npz", examples=256, inputs=28 * 28, classes=10)
    program = REPORT_MODULES + "from edgeasync.cli.main import main; main()"
    agent = commands.agent(address, "small", data=data, step_s=0.0, program=("-c", program))
    status = trained(address, 5, "small")
    assert status["parameters"] == 61_706
    agent.signal(signal.SIGTERM)
    modules = modules_of(agent)
    assert "onnxruntime" in modules
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
