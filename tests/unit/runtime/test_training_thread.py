"""What the training thread asks of a trainer of the user's own."""

from types import SimpleNamespace

import pytest

from edgeasync.runtime.training_thread import TrainingThread
from edgeasync.runtime.workload import Workload
from edgeasync.training.local_parameters import LocalParameters


def thread_of(trainer, warn):
    found = TrainingThread(
        Workload(lambda welcome: trainer), LocalParameters([]), step_s_min=0.0, share=lambda: 1.0,
        local_steps=lambda: None, validate=lambda: None, hand_over=lambda work: None, warn=warn,
        fail=lambda error: None,
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
    assert all("this trainer cannot: give it a method scale_learning_rate(factor)" in line for line in warnings)
