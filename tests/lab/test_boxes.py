"""Processes in boxes of a board's size."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgeasync import nn
from tests.support.boards.box import Box
from tests.support.boards.digits import write_digits
from tests.support.models.graphs import LENET
from tests.support.size import repetitions

pytestmark = pytest.mark.process


MIB = 1 << 20
ACCURACY = 0.9
FAST_STEP_S = 0.05
SLOW_LEARNING = 'optimizer = [{ kind = "sgd", learning_rate = 0.0005 }]'
"""It takes half a minute: a box needs ten seconds to start an agent, and short bursts escape its quota."""
LONGEST_S = 600.0
ROOT = Path(__file__).parents[2]
MAIN = "from edgeasync.cli.main import main; main()"
LARGE_BATCH = "import sys; from tests.support.programs.large_batch import main; main(0, 'sees', 'plain')"


@contextlib.contextmanager
def box_of(cpu_percent, memory_bytes):
    """Make a box, or skip the test where a box cannot be made."""
    try:
        box = Box("edgeasync-lab", cpu_percent=cpu_percent, memory_bytes=memory_bytes)
    except OSError as error:
        pytest.skip(f"no boxes can be made here: {error}")
    yield box
    box.close()


def train_lenet(commands, name, box=None):
    """Train on three devices, and on a fourth in the box; return the seconds to the target, and the agents."""
    settings = commands.settings(
        name=name,
        model='kind = "onnx"\nfile = "lenet.onnx"',
        hub=f"stop = {{ accuracy = {ACCURACY} }}",
        more=f'[evaluation]\ndata = "held-out.npz"\nevery = "1 s"\n[local]\n{SLOW_LEARNING}\n',
    )
    hub, address = commands.hub(settings)

    def start(number, **options):
        data = commands.folder / f"{number}.npz"
        return commands.agent(address, f"{name}-{number}", data=data, **options)

    agents = [start(number, step_s=FAST_STEP_S) for number in range(3)]
    if box is not None:
        agents.append(start(3, step_s=0.0, program=("-c", box.enter + MAIN)))
    assert hub.wait(LONGEST_S) == 0
    began = max(hub.wait_for("joined", device=f"{name}-{number}")["time"] for number in range(3))
    return hub.wait_for("finished")["time"] - began, agents


if repetitions("boxes of a board's size"):

    def test_a_tenth_of_a_core_and_448_mb_train_lenet_beside_three_faster_ones(commands):
        nn.save(LENET, commands.folder / "lenet.onnx", (1, 28, 28))
        write_digits(commands.folder, 4, enlarged=True)
        alone_s, _ = train_lenet(commands, "alone")
        with box_of(10, 448 * MIB) as box:
            together_s, agents = train_lenet(commands, "together", box)
            assert [agent.wait() for agent in agents] == [0] * 4
            assert agents[3].wait_for("stopped")["updates_answered"] >= 3
            assert box.kills == 0
            assert box.peak_bytes <= 128 * MIB
        assert together_s <= 1.2 * alone_s

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
