"""Evaluations of the hub's model: the best so far, the end of training, and a learning rate that falls. No I/O."""

import math

import msgspec

from edgeasync.core.hub.effects import HubEffect, Report, SaveBest
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.settings import StopCondition
from edgeasync.policies.policy import Plateau


class EvaluationTrackerState(msgspec.Struct):
    """What is durable of `EvaluationTracker`."""

    last: Evaluated | None
    best: Evaluated | None
    reached: str
    learning_rate_factor: float
    lowest: float
    waited: int
    unjudged: bool = False


class EvaluationTracker:
    """What evaluations have shown: the last, the best, and, once training has reached what it is for, `reached`.

    The best has the highest accuracy, and of equal ones, or without accuracies, the lowest loss.
    """

    def __init__(self, plateau: Plateau | None, stop: StopCondition) -> None:
        self.last: Evaluated | None = None
        self.best: Evaluated | None = None
        self.reached = ""
        self.learning_rate_factor = 1.0
        self._plateau = plateau
        self._stop = stop
        self._lowest = math.inf
        self._waited = 0
        self._unjudged = False
        """Whether it was told that nothing can be evaluated, and nothing was since."""

    def dump_state(self) -> EvaluationTrackerState:
        """Return the durable state."""
        return EvaluationTrackerState(
            last=self.last,
            best=self.best,
            reached=self.reached,
            learning_rate_factor=self.learning_rate_factor,
            lowest=self._lowest,
            waited=self._waited,
            unjudged=self._unjudged,
        )

    def load_state(self, state: EvaluationTrackerState) -> None:
        """Go on from a durable state."""
        self.last = state.last
        self.best = state.best
        self.reached = state.reached
        self.learning_rate_factor = state.learning_rate_factor
        self._lowest = state.lowest
        self._waited = state.waited
        self._unjudged = state.unjudged

    def evaluated(self, evaluation: Evaluated, effects: list[HubEffect]) -> None:
        """Take in an evaluation; the best version is to be saved."""
        self.last = evaluation
        self._unjudged = False
        loss, accuracy = evaluation.loss, evaluation.accuracy
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        detail = f"version {evaluation.number}, loss {loss:.4g}{shown}"
        best = math.isfinite(loss) and (self.best is None or is_better(evaluation, self.best))
        effects.append(Report("evaluated", detail=f"{detail}, the best so far" if best else detail))
        if best:
            self.best = evaluation
            effects.append(SaveBest(loss, accuracy))
        self._lower_learning_rate(loss, effects)
        stop = self._stop
        if stop.loss is not None and loss <= stop.loss:
            self.reached = f"loss {loss:.4g} is at most {stop.loss:g}"
        elif stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
            self.reached = f"accuracy {accuracy:.2%} is at least {stop.accuracy:.2%}"

    def not_evaluated(self, effects: list[HubEffect]) -> None:
        """Warn, once, if something waits for an evaluation that no device's loss stands for."""
        waits = [
            name
            for name, value in (("stop.loss", self._stop.loss), ("plateau", self._plateau))
            if value is not None
        ]
        if waits and not self._unjudged:
            self._unjudged = True
            detail = f"no device tells a loss, so {' and '.join(waits)} cannot be judged: give evaluation.data"
            effects.append(Report("warning", detail=detail))

    def _lower_learning_rate(self, loss: float, effects: list[HubEffect]) -> None:
        """Count evaluations that are no better; lower the learning rate when there were too many."""
        plateau = self._plateau
        if plateau is None:
            return
        if loss < self._lowest * (1.0 - plateau.improvement):
            self._lowest, self._waited = loss, 0
            return
        self._waited += 1
        if self._waited >= plateau.patience and self.learning_rate_factor > plateau.factor_min:
            self._waited = 0
            self.learning_rate_factor = max(plateau.factor_min, self.learning_rate_factor * plateau.factor)
            left = f"{self.learning_rate_factor:.3g} of what was set"
            effects.append(Report("plateau", detail=f"the server's learning rate is now {left}"))


def is_better(one: Evaluated, other: Evaluated) -> bool:
    """Return whether a version is better than another: by accuracy, or else, and of equal ones, by loss."""
    if one.accuracy is None or other.accuracy is None:
        return one.loss < other.loss
    return (-one.accuracy, one.loss) < (-other.accuracy, other.loss)
