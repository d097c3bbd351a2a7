"""Processes in boxes of a board's size. Others use this machine, too, so no time is measured here."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeasync import nn
from tests.support.box import Box
from tests.support.graphs import LENET
from tests.support.processes import status_when
from tests.support.size import repetitions

pytestmark = pytest.mark.process

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
MAIN = "from edgeasync.cli.main import main; main()"
LARGE_BATCH = "import sys; from tests.support.large_batch import main; main(0, 'sees', 'plain')"


@contextlib.contextmanager
def box_of(cpu_percent, memory_bytes):
    """Make a box, or skip the test where a box cannot be made."""
    try:
        box = Box("edgeasync-lab", cpu_percent=cpu_percent, memory_bytes=memory_bytes)
    except OSError as error:
        pytest.skip(f"no boxes can be made here: {error}")
    yield box
    box.close()


def start_hub(commands):
    nn.save(LENET, commands.folder / "lenet.onnx", (1, 28, 28))
    hub = commands.start("hub", "--model", "lenet.onnx", "--bind", "tcp://127.0.0.1:*", "--run", "run", "--json")
    data = commands.data("digits.npz", examples=1024, inputs=28 * 28, classes=10)
    return hub.wait_for("listening")["detail"], data


if repetitions("boxes of a board's size"):

    def test_a_tenth_of_a_core_and_448_mb_train_lenet_beside_three_faster_ones(commands):
        address, data = start_hub(commands)
        for name in ("fast-0", "fast-1", "fast-2"):
            commands.agent(address, name, data=data, step_s=0.05)
        with box_of(10, 448 * MIB) as box:
            small = commands.agent(address, "small", data=data, step_s=0.0, program=("-c", box.enter + MAIN))

            def device(status):
                return next((each for each in status["devices"] if each["id"] == "small"), None)

            status = status_when(address, lambda told: (found := device(told)) and found["updates_applied"] >= 3)
            assert device(status)["state"] == "training"
            assert box.kills == 0
            assert box.peak_bytes <= 128 * MIB
            small.signal(signal.SIGTERM)
            assert small.wait() == 0

    def test_with_40_mb_less_than_a_step_needs_nothing_is_killed_and_the_batch_is_split():
        def run(box):
            command = [sys.executable, "-c", box.enter + LARGE_BATCH]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
            assert (done.returncode, box.kills) == (0, 0), done.stderr
            return json.loads(done.stdout), done.stderr

        with box_of(100, 2048 * MIB) as box:
            whole, told = run(box)
            assert not told
        with box_of(100, whole["private"] - 40_000_000) as box:
            split, told = run(box)
            assert "at a time" in told
        assert split["losses"] == pytest.approx(whole["losses"], rel=1e-5)
