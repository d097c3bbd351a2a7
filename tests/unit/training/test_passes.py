"""A trainer takes every example once a pass, also over restarts, and then no more steps."""

import numpy as np
import pytest

from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.passes import PassesTrainer
from edgeasync.training.trainer import (
    BufferedTrainer,
    InterruptibleTrainer,
    MeasuringTrainer,
    ResettableTrainer,
    ResumableTrainer,
    ScalableTrainer,
    StepsEndedError,
)

MODEL = SoftmaxModel(inputs=3, classes=2)
EXAMPLES, PASSES = 10, 3


def make(seen, examples=EXAMPLES):
    def gradient(parameters, x, y, out):
        seen.extend(int(value) for value in x[:, 0])
        return MODEL.gradient(parameters, x, y, out)

    x = np.zeros((examples, 3), np.float32)
    x[:, 0] = np.arange(examples)
    data = Dataset.of(x, np.arange(examples) % 2)
    trainer = GradientTrainer(MODEL.spec, gradient, [SGD(learning_rate=0.1)], batches(data, 4, seed=1))
    return PassesTrainer(trainer, PASSES * examples)


def run(trainer, steps=100):
    trainer.begin(MODEL.initial(0))
    for _ in range(steps):
        try:
            trainer.step()
        except StepsEndedError:
            return


@pytest.mark.parametrize("killed_after", range(10))
def test_every_example_is_taken_once_a_pass_over_a_restart(killed_after):
    undisturbed, seen = [], []
    run(make(undisturbed))
    assert len(undisturbed) == PASSES * EXAMPLES
    for first in range(0, len(undisturbed), EXAMPLES):
        assert sorted(undisturbed[first : first + EXAMPLES]) == list(range(EXAMPLES))
    before, after = make(seen), make(seen)
    run(before, killed_after)
    after.restore(before.state())
    run(after)
    assert seen == undisturbed


@pytest.mark.parametrize(
    "change", [{"examples": np.zeros(2)}, {"examples": None}, {"trainer.batches": np.zeros(3)}]
)
def test_another_trainers_state_is_refused(change):
    trainer = make([])
    state = {name: array for name, array in (dict(trainer.state()) | change).items() if array is not None}
    with pytest.raises(ValueError):
        trainer.restore(state)


def test_it_is_what_the_trainer_is_and_no_more():
    trainer = make([])
    assert (trainer.spec, trainer.metrics()) == (MODEL.spec, {})
    for kind in (MeasuringTrainer, ResettableTrainer, ResumableTrainer, ScalableTrainer):
        assert isinstance(trainer, kind)
    for kind in (BufferedTrainer, InterruptibleTrainer):
        assert not isinstance(trainer, kind)
    assert not hasattr(trainer, "score")
