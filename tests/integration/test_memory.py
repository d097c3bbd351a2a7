"""A process with less address space than a step on its batch needs: it computes the batch in parts, and trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgeasync import Agent, Hub, StepResult
from edgeasync.errors import NoMemoryError
from edgeasync.training.numpy_models import SoftmaxModel

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def run(limit=0, sight="sees", kind="plain"):
    command = [sys.executable, "-m", "tests.support.programs.large_batch", str(limit), sight, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.fixture(scope="module")
def whole():
    code, found, told = run()
    assert (code, told) == (0, "")
    return found


@pytest.mark.parametrize("sight", ["sees", "blind"], ids=["foreseen", "as it fails"])
def test_with_far_less_than_a_step_needs_the_batch_is_split_and_trained(whole, sight):
    limit = whole["needed"] // 2 - 40_000_000
    code, found, told = run(limit, sight)
    assert code == 0, told
    assert ("at a time" if sight == "sees" else "continuing with 256") in told
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found["needed"] < whole["needed"] - 40_000_000


def test_a_batch_norm_that_does_not_fit_ends_with_a_code_of_its_own(whole):
    code, _, told = run(whole["needed"] - 40_000_000, "sees", "norm")
    assert (code, "the model has a batch norm" in told) == (14, True), told


class Full:
    """A trainer of a user's own that finds no memory."""

    spec = SoftmaxModel(inputs=4, classes=2).spec

    def begin(self, parameters):
        pass

    def step(self) -> StepResult:
        raise MemoryError


def test_a_trainer_of_the_users_own_without_memory_ends_the_agent_by_name(tmp_path):
    with (
        Hub(SoftmaxModel(inputs=4, classes=2), run=tmp_path, bind="tcp://127.0.0.1:*") as hub,
        pytest.raises(NoMemoryError, match="not enough memory for the model"),
        Agent(hub.address, trainer=Full()) as agent,
    ):
        agent.wait()
