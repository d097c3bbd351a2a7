"""What the training thread asks of a trainer of the user's own."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from edgeasync import StepResult
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.runtime.training_thread import TrainingThread
from edgeasync.runtime.workload import Workload
from edgeasync.training.local_parameters import LocalParameters
from tests.support.programs.processes import PATIENCE_S


def thread_of(trainer, warn):
    found = TrainingThread(
        Workload(lambda welcome: trainer), LocalParameters([]), step_s_min=0.0, share=1.0,
        hand_over=lambda work: None, warn=warn, fail=lambda error: None,
    )  # fmt: skip
    found.trainer = trainer
    return found


@pytest.mark.parametrize("can", [True, False])
def test_a_trainer_scales_its_rate_or_the_device_says_that_it_cannot(can):
    factors, warnings = [], []
    trainer = SimpleNamespace(scale_learning_rate=factors.append) if can else SimpleNamespace()
    thread = thread_of(trainer, warnings.append)
    for factor in (0.5, 1.0):
        thread.scale_learning_rate(factor)
    assert factors == ([0.5, 1.0] if can else [])
    assert len(warnings) == (not can)
    assert all("does not support it; add a method scale_learning_rate(factor)" in line for line in warnings)


class Endless:
    """A trainer whose third step asks it to make way."""

    taken = 0

    def begin(self, parameters):
        self.taken = 0

    def step(self):
        self.taken += 1
        if self.taken == 3:
            self.thread.pause()
        return StepResult(float(self.taken), 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("overlap", [False, True])
async def test_only_overlapped_steps_make_way_and_what_was_done_counts(overlap):
    trainer, model, done = Endless(), Mock(parameters=np.zeros(1)), asyncio.get_running_loop().create_future()
    thread = trainer.thread = thread_of(trainer, done.set_exception)
    thread._hand_over = asyncio.get_running_loop().call_soon_threadsafe
    thread._local.begin(ParameterSpec((Parameter("w", (1,)),)), {}, print)
    thread.begin(asyncio.get_running_loop())
    thread.train(model, 5, done.set_result, overlap=overlap, first=False)
    async with asyncio.timeout(PATIENCE_S):
        trained = await done
    thread.end()
    assert await thread.close(PATIENCE_S)
    assert trained.local_steps == (3 if overlap else 5)
    assert trained.base_loss == (None if overlap else 1.0)


@pytest.mark.asyncio
async def test_an_overlap_that_must_make_way_at_once_does_nothing_more():
    """It neither counts as work nor as a trainer that has no more steps."""
    trainer, told = Endless(), []
    thread = thread_of(trainer, told.append)
    thread._hand_over = told.append
    thread._local.begin(ParameterSpec((Parameter("w", (1,)),)), {}, print)
    thread.train(Mock(parameters=np.zeros(1)), 5, told.append, overlap=True, first=False)
    thread.pause()
    loop, after = asyncio.get_running_loop(), asyncio.Event()
    thread.submit(lambda: loop.call_soon_threadsafe(after.set))
    thread.begin(loop)
    async with asyncio.timeout(PATIENCE_S):
        await after.wait()
    thread.end()
    assert await thread.close(PATIENCE_S)
    assert (trainer.taken, told) == (0, [])


@pytest.mark.asyncio
async def test_brief_work_runs_at_once_but_only_if_the_thread_has_nothing_to_do():
    thread, done, told = thread_of(None, print), [], asyncio.Queue()
    loop = asyncio.get_running_loop()
    thread._hand_over = loop.call_soon_threadsafe
    thread.run(lambda: done.append("first"), lambda _: None, brief=True)
    assert done == ["first"]
    thread.submit(lambda: done.append("second"))
    thread.run(lambda: done.append("third"), told.put_nowait, brief=True)
    assert done == ["first"]
    thread.begin(loop)
    async with asyncio.timeout(PATIENCE_S):
        await told.get()
    assert done == ["first", "second", "third"]
    thread.end()
    assert await thread.close(PATIENCE_S)
