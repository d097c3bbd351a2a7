import math
import tracemalloc
from itertools import islice, repeat

import numpy as np
import pytest

from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError, DataError, ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.trainer import StepResult

SPEC = ParameterSpec((Parameter("w", (3,)),))
BATCH = (np.ones((4, 3), np.float32), np.zeros(4, np.int64))


def towards_one(parameters, x, y, out):
    """Half the squared distance from one, and its gradient."""
    np.subtract(parameters, 1.0, out=out)
    return float(0.5 * np.vdot(out, out))


def test_gradient_trainer_takes_the_optimizers_steps():
    trainer = GradientTrainer(SPEC, towards_one, [SGD(learning_rate=0.1, momentum=0.9)], repeat(BATCH))
    with pytest.raises(RuntimeError, match="before begin"):
        trainer.step()
    with pytest.raises(ModelMismatchError):
        trainer.begin(np.zeros(4, np.float32))
    parameters, expected, velocity = np.zeros(3, np.float32), 0.0, 0.0
    trainer.begin(parameters)
    for _ in range(5):
        assert trainer.step() == StepResult(pytest.approx(1.5 * (expected - 1.0) ** 2), 4)
        velocity = 0.9 * velocity + (expected - 1.0)
        expected -= 0.1 * velocity
        assert parameters == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"micro_batch_size": 2}], ids=str)
def test_batches_that_end_are_a_clear_error(settings):
    """Red before: batches together or in parts raised a RuntimeError about a generator."""
    trainer = GradientTrainer(SPEC, towards_one, [SGD(learning_rate=0.1)], iter([]), **settings)
    trainer.begin(np.zeros(3, np.float32))
    with pytest.raises(DataError, match="needs an endless iterator"):
        trainer.step()


@pytest.mark.parametrize("keep", [False, True])
def test_an_assignment_resets_the_optimizer_unless_told_and_never_the_data(keep):
    data = Dataset.of(np.zeros((9, 3)), np.arange(9))
    seen = []

    def gradient(parameters, x, y, out):
        seen.extend(y.tolist())
        return towards_one(parameters, x, y, out)

    optimizer = [SGD(learning_rate=0.1, momentum=0.9)]
    trainer = GradientTrainer(SPEC, gradient, optimizer, batches(data, 3, 0), keep_optimizer_state=keep)
    firsts = []
    for _ in range(3):
        parameters = np.zeros(3, np.float32)
        trainer.begin(parameters)
        trainer.step()
        firsts.append(float(parameters[0]))
    assert sorted(seen) == list(range(9))
    assert firsts == pytest.approx([0.1, 0.19, 0.271] if keep else [0.1, 0.1, 0.1])


class NormRecorder(SGD, frozen=True):
    """SGD that shows the norm and count it was planned with in its learning rate."""

    def plan(self, conditions):
        return (conditions.norm * 10**conditions.count, 0.0)


def test_a_long_model_is_updated_whole_with_its_norm_and_only_where_trained():
    spec = ParameterSpec((Parameter("w", (200_000,)), Parameter("running", (3,), "statistic")))
    parameters = np.zeros(spec.length, np.float32)

    def gradient(parameters, x, y, out):
        out.fill(2.0)
        parameters[-3:] = 7.0
        return 0.0

    trainer = GradientTrainer(spec, gradient, [NormRecorder()], repeat(BATCH))
    trainer.begin(parameters)
    trainer.step()
    norm = 2.0 * math.sqrt(200_000)
    assert np.allclose(parameters[:-3], -2.0 * norm)
    trainer.step()
    assert np.allclose(parameters[:-3], -22.0 * norm)
    assert (parameters[-3:] == 7.0).all()


def test_a_step_allocates_nothing_of_the_models_length():
    spec = ParameterSpec((Parameter("w", (2**21,)),))
    trainer = GradientTrainer(spec, towards_one, [SGD(momentum=0.9)], repeat(BATCH))
    trainer.begin(np.zeros(spec.length, np.float32))
    trainer.step()
    tracemalloc.start()
    for _ in islice(repeat(None), 3):
        trainer.step()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < spec.nbytes / 50


def test_a_diverging_model_neither_raises_nor_warns():
    trainer = GradientTrainer(SPEC, towards_one, [SGD(learning_rate=1e6)], repeat(BATCH))
    trainer.begin(np.zeros(3, np.float32))
    losses = [trainer.step().loss for _ in range(30)]
    assert not math.isfinite(losses[-1])


def test_a_state_of_another_trainer_is_refused():
    trainer = GradientTrainer(SPEC, towards_one, [SGD()], repeat(BATCH), keep_optimizer_state=True)
    for state in ({}, {"count": np.zeros(1, np.int64), "optimizer.0": np.zeros(4, np.float32)}):
        with pytest.raises(ValueError, match="arrays do not match this trainer's"):
            trainer.restore(state)
    trainer.restore(trainer.state())


@pytest.mark.parametrize("learning_rate", [-1.0, 0.0, math.inf, math.nan, "fast", None])
def test_a_number_out_of_its_range_is_named(learning_rate):
    with pytest.raises(ConfigError, match=r"^SGD: .*learning_rate"):
        GradientTrainer(SPEC, towards_one, [SGD(learning_rate=learning_rate)], repeat(BATCH))


def moves(rate, factors, momentum):
    """Return how far each step moves a parameter whose gradient is 1."""
    optimizer = [SGD(learning_rate=rate, momentum=momentum)]
    trainer = GradientTrainer(SPEC, lambda parameters, x, y, out: out.fill(1.0), optimizer, repeat(BATCH))
    vector, places = np.zeros(3, np.float32), [0.0]
    trainer.begin(vector)
    for factor in factors:
        trainer.scale_learning_rate(factor)
        trainer.step()
        places.append(float(vector[0]))
    return -np.diff(places)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scaled_learning_rate_is_a_lower_one_until_it_is_scaled_back(momentum):
    whole, low = (moves(rate, (1.0, 1.0, 1.0), momentum) for rate in (0.5, 0.25))
    assert moves(0.5, (1.0, 0.5, 1.0), momentum) == pytest.approx([whole[0], low[1], whole[2]], rel=1e-6)
