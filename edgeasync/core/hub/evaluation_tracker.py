"""Evaluations of the hub's model: best version, stop conditions and plateaus."""

import math

import msgspec

from edgeasync.core.hub.effects import HubEffect, HubReport, WriteBest
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.settings import StopCondition, StopPlateau
from edgeasync.policies.policy import Plateau

RISEN = 1.25
"""A held-out loss has risen if it exceeds the lowest held-out loss by this factor."""

RISEN_EVALUATIONS = 10
"""The hub warns after this number of consecutive evaluations with a risen loss and no new best
version.
"""


class EvaluationState(msgspec.Struct):
    """The durable state of `EvaluationTracker`.

    - `best` is the evaluation with the highest accuracy. Among equal accuracies, or without
      accuracies, it is the one with the lowest loss.
    - `reached` describes the stop condition that was met, if any.
    - `lowest` is the lowest loss so far, for `policy.plateau`. `waited` counts the evaluations
      since then.
    - `unjudged` is true once the hub has warned that no loss is available.
    - `mark` is the evaluation with which later ones are compared for `hub.stop.plateau`. It was
      made at the time `mark_s`, after `mark_updates` updates.
    - `lowest_held_out` is the lowest loss on held-out data. `risen` counts the consecutive
      evaluations with a loss well above it.
    - `begun_s` is the time at which the last evaluation began.
    """

    last: Evaluated | None = None
    best: Evaluated | None = None
    reached: str = ""
    learning_rate_factor: float = 1.0
    lowest: float = math.inf
    waited: int = 0
    unjudged: bool = False
    mark: Evaluated | None = None
    mark_updates: int = 0
    mark_s: float = 0.0
    lowest_held_out: float = math.inf
    risen: int = 0
    begun_s: float = 0.0


class EvaluationTracker:
    """Finds the best version, checks stop conditions, and acts on plateaus."""

    def __init__(self, plateau: Plateau | None, stop: StopCondition, *, held_out: bool) -> None:
        self.state = EvaluationState()
        self._plateau = plateau
        self._stop = stop
        self._held_out = held_out

    def observe(self, evaluation: Evaluated, updates_applied: int, now_s: float) -> list[HubEffect]:
        """Compare an evaluation with the best evaluation and with the stop conditions.

        Return the resulting effects: a report and, if the version is a new best one, an effect that
        writes it to disk.
        """
        state, stop = self.state, self._stop
        state.last = evaluation
        state.unjudged = False
        loss, accuracy = evaluation.loss, evaluation.accuracy
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        detail = f"version {evaluation.number}, loss {loss:.4g}{shown}"
        best = math.isfinite(loss) and (state.best is None or is_better(evaluation, state.best))
        effects: list[HubEffect] = [
            HubReport("evaluated", detail=f"{detail}, the best so far" if best else detail)
        ]
        if best:
            state.best = evaluation
            effects.append(WriteBest(loss, accuracy))
        if stop.loss is not None and loss <= stop.loss:
            state.reached = f"loss {loss:.4g} is at most {stop.loss:g}"
        elif stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
            state.reached = f"accuracy {accuracy:.2%} is at least {stop.accuracy:.2%}"
        elif stop.plateau is not None:
            state.reached = self._stood_still(stop.plateau, evaluation, updates_applied, now_s)
        if self._held_out:
            effects += self._warn_of_rise(loss, best=best)
        return effects + self._lower_learning_rate(loss)

    def warn_unjudged(self) -> list[HubEffect]:
        """Warn once if a setting requires a loss but no device reports one."""
        waits = [
            name
            for name, value in (
                ("stop.loss", self._stop.loss),
                ("stop.plateau", self._stop.plateau),
                ("plateau", self._plateau),
            )
            if value is not None
        ]
        if not waits or self.state.unjudged:
            return []
        self.state.unjudged = True
        detail = f"no device reports a loss, so {' and '.join(waits)} cannot be checked; set evaluation.data"
        return [HubReport("warning", detail=detail)]

    def _warn_of_rise(self, loss: float, *, best: bool) -> list[HubEffect]:
        """Warn if the held-out loss stays well above its lowest value.

        Any new best version resets the warning.
        """
        state = self.state
        state.lowest_held_out = min(state.lowest_held_out, loss)  # NaN is never lower
        risen = loss > RISEN * state.lowest_held_out >= 0.0  # negative losses are not checked
        state.risen = state.risen + 1 if risen and not best else 0
        if state.risen != RISEN_EVALUATIONS or state.best is None:
            return []
        detail = (
            f"the held-out loss rose from {state.lowest_held_out:.4g} to {loss:.4g} and has not recovered for "
            f"{RISEN_EVALUATIONS} evaluations: the devices overfit their own data. Version {state.best.number} is "
            "the best; set hub.stop.plateau to end training, or policy.plateau to lower the learning rate"
        )
        return [HubReport("warning", detail=detail)]

    def _stood_still(self, plateau: StopPlateau, evaluation: Evaluated, updates: int, now_s: float) -> str:
        """Return for how long no evaluation has improved, as text.

        Return "" if that is not long enough.
        """
        state = self.state
        if state.mark is None or _improves(evaluation, state.mark, plateau.improvement):
            state.mark, state.mark_updates, state.mark_s = evaluation, updates, now_s
            return ""
        waited, minutes = updates - state.mark_updates, (now_s - state.mark_s) / 60.0
        if waited < (plateau.updates or 0) or minutes < (plateau.minutes or 0.0):
            return ""
        return f"no evaluation improved by {plateau.improvement:g} in {waited} updates and {minutes:.3g} minutes"

    def _lower_learning_rate(self, loss: float) -> list[HubEffect]:
        """Reduce the learning rate after `patience` evaluations without a lower loss."""
        state, plateau = self.state, self._plateau
        if plateau is None:
            return []
        # A negative loss that improves moves away from 0.
        improvement = plateau.improvement if state.lowest >= 0.0 else -plateau.improvement
        if loss < state.lowest * (1.0 - improvement):
            state.lowest, state.waited = loss, 0
            return []
        state.waited += 1
        if state.waited < plateau.patience or state.learning_rate_factor <= plateau.factor_min:
            return []
        state.waited = 0
        state.learning_rate_factor = max(plateau.factor_min, state.learning_rate_factor * plateau.factor)
        left = f"{state.learning_rate_factor:.3g} times the configured one"
        return [HubReport("plateau", detail=f"the hub's learning rate is now {left}")]


def goodness(loss: float | None, accuracy: float | None) -> tuple[float, float]:
    """Return a sort key that is higher for better evaluations.

    Accuracies are compared first. A lower loss decides between equal accuracies.
    """
    return -math.inf if accuracy is None else accuracy, -math.inf if loss is None or math.isnan(loss) else -loss


def is_better(one: Evaluated, other: Evaluated) -> bool:
    """Return whether one evaluation is better than another."""
    return goodness(one.loss, one.accuracy) > goodness(other.loss, other.accuracy)


def _improves(one: Evaluated, mark: Evaluated, improvement: float) -> bool:
    """Return whether an evaluation improves on `mark` by at least `improvement`.

    If both have an accuracy, `improvement` is an absolute difference of accuracies. Otherwise, it
    is a relative decrease of the loss.
    """
    if one.accuracy is not None and mark.accuracy is not None:
        return one.accuracy > mark.accuracy and one.accuracy >= mark.accuracy + improvement
    if not math.isfinite(mark.loss):
        return math.isfinite(one.loss)
    return one.loss < mark.loss and one.loss <= mark.loss - improvement * abs(mark.loss)
