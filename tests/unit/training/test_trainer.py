import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.core.device.events import Trained
from edgeasync.errors import DataError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.training.trainer import BufferedTrainer, StepResult, StepsEndedError, take_local_steps

SPEC = ParameterSpec((Parameter("w", (3,)),))


class FakeTrainer:
    """Reports given losses and takes given times on the fake clock it is."""

    spec = SPEC

    def __init__(self, losses, times_s=None):
        self.steps = zip(losses, times_s or [0.0] * len(losses), strict=True)
        self.now_s = 100.0
        self.waits_s = []
        self.taken = 0

    def begin(self, parameters):
        pass

    def step(self):
        loss, time_s = next(self.steps)
        self.now_s += time_s
        self.taken += 1
        return StepResult(loss, 4)

    def wait(self, remaining_s):
        self.waits_s.append(remaining_s)
        self.now_s += remaining_s

    def run(self, local_steps, *, stop_after=math.inf, step_s_min=0.0, on_step=lambda: None):
        return take_local_steps(
            self,
            local_steps,
            should_stop=lambda: self.taken >= stop_after,
            on_step=on_step,
            wait=self.wait,
            clock=lambda: self.now_s,
            step_s_min=step_s_min,
        )


class FakeBuffered(FakeTrainer):
    """A trainer whose parameters are elsewhere: bringing them takes a second."""

    def __init__(self, losses, *, in_reach=True):
        super().__init__(losses)
        self.flushed_after = []
        self._in_reach = in_reach

    def step(self):
        if self.taken == 3:
            raise StepsEndedError("no more")
        return super().step()

    def flush(self):
        if not self._in_reach:
            raise StepsEndedError("gone")
        self.now_s += 1.0
        self.flushed_after.append(self.taken)


def test_a_trainer_brings_its_parameters_once_after_the_last_step_and_that_takes_time():
    assert isinstance(FakeBuffered([]), BufferedTrainer)
    trainer = FakeBuffered([1.0] * 3)
    result = trainer.run(2)
    assert trainer.flushed_after == [2]
    assert result.step_s == pytest.approx(0.5)
    assert trainer.run(5).local_steps == 1, "one more, then none"
    assert trainer.flushed_after == [2, 3]
    assert trainer.run(5) is None
    assert trainer.run(0).local_steps == 0
    assert trainer.flushed_after == [2, 3], "without a step there is nothing to bring"


def test_steps_whose_parameters_are_out_of_reach_are_abandoned():
    assert FakeBuffered([1.0] * 3, in_reach=False).run(2) is None


def test_steps_are_padded_and_measured():
    trainer = FakeTrainer([1.0, 2.0, 6.0], [0.25, 1.0, 0.5])
    called = []
    result = trainer.run(3, step_s_min=0.5, on_step=lambda: called.append(trainer.taken))
    assert result == Trained(3, 12, 3.0, pytest.approx(14 / 3), 2.0 / 3, base_loss=1.0)
    assert trainer.waits_s == [0.25]
    assert called == [1, 2, 3]


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stop_abandons_the_work(stop_after):
    trainer = FakeTrainer([1.0] * 3)
    assert trainer.run(3, stop_after=stop_after) is None
    assert trainer.taken == stop_after
    with pytest.raises(ValueError, match="local_steps is -1"):
        trainer.run(-1)


@pytest.mark.parametrize("continues", [False, True])
def test_steps_that_continue_have_neither_score_nor_base_loss(continues):
    trainer = FakeTrainer([1.0, 2.0], [1.0, 1.0])
    trainer.score = lambda: 7.0
    how = {"should_stop": lambda: False, "on_step": lambda: None, "wait": trainer.wait}
    result = take_local_steps(trainer, 2, continues=continues, **how)
    assert (result.score, result.base_loss) == ((None, None) if continues else (7.0, 1.0))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.sampled_from([0.0, 1e8]))
def test_the_variance_is_sound_far_from_zero(losses, offset):
    shifted = [loss + offset for loss in losses]
    result = FakeTrainer(shifted).run(len(shifted))
    exact = np.array([loss - offset for loss in shifted])
    assert result.loss_mean - offset == pytest.approx(exact.mean(), abs=1e-5)
    assert result.loss_variance == pytest.approx(exact.var(), rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308])
def test_a_loss_that_is_no_number_is_reported_not_raised(bad):
    result = FakeTrainer([1.0, bad, -bad, 1.0]).run(4)
    assert result.local_steps == 4
    assert not math.isfinite(result.loss_variance)


@pytest.mark.parametrize(
    ("losses", "mean", "variance"),
    [([None, None], None, None), ([None, 1.0, None, 3.0], 2.0, 1.0), ([2.0, None], 2.0, 0.0)],
)
def test_a_step_need_not_have_a_loss(losses, mean, variance):
    result = FakeTrainer(losses).run(len(losses))
    assert result.local_steps == len(losses)
    assert (result.loss_mean, result.loss_variance) == (mean, variance)


class Telling:
    """A trainer whose every step tells the same."""

    def __init__(self, result):
        self._result = result

    def step(self):
        return self._result


def told_by(trainer):
    return take_local_steps(trainer, 2, should_stop=lambda: False, on_step=lambda: None, wait=lambda _: None)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.array, float])
def test_a_step_may_tell_numbers_of_numpy(number):
    told = told_by(Telling(StepResult(number(0.5), np.int64(8))))
    assert (told.loss_mean, told.examples) == (0.5, 16)
    assert (type(told.loss_mean), type(told.examples)) == (float, int)


@pytest.mark.parametrize(
    "result", [None, StepResult(1.0, 2.5), StepResult(1.0, -3), StepResult(1.0, None), StepResult([1.0, 2.0], 8)]
)
def test_a_step_that_tells_something_else_is_an_error(result):
    with pytest.raises(DataError, match=r"a trainer's step returned .*; return StepResult\(loss, examples\)"):
        told_by(Telling(result))


class Measuring(Telling):
    """A trainer that measures, too."""

    def __init__(self, metrics):
        super().__init__(StepResult(1.0, 4))
        self._metrics = metrics

    def begin(self, parameters):
        pass

    spec = SPEC

    def metrics(self):
        return self._metrics


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, None),
        ({"f1": np.float32(0.5), "top_5": 1}, {"f1": 0.5, "top_5": 1.0}),
        ({"mae": math.nan, "f1": 0.5}, {"f1": 0.5}),
        ({"mae": math.inf}, None),
    ],
)
def test_metrics_are_plain_and_finite(metrics, told):
    assert told_by(Measuring(metrics)).metrics == told


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {"a b": 1.0},
        {"x" * 33: 1.0},
        {"f1": "good"},
        dict.fromkeys("abcdefghi", 1.0),
    ],
)
def test_metrics_that_cannot_travel_are_an_error(metrics):
    with pytest.raises(DataError, match=r"a trainer's metrics\(\) returned .*; return a dict of at most 8"):
        told_by(Measuring(metrics))


def test_metrics_of_two_calls_are_joined_by_their_examples():
    def trained(examples, metrics):
        return Trained(1, examples, None, None, 0.1, metrics=metrics)

    first, second = trained(30, {"f1": 0.5, "mae": 2.0}), trained(10, {"f1": 0.9})
    assert second.after(first).metrics == pytest.approx({"f1": 0.6})
    assert second.after(trained(5, None)).metrics == {"f1": 0.9}
    assert trained(5, None).after(first).metrics == first.metrics
