"""Evaluations of the hub's model: the best so far, the end of training, and a learning rate that falls. No I/O."""

import math

import msgspec

from edgeasync.core.hub.effects import HubEffect, Report, SaveBest
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.settings import StopCondition
from edgeasync.policies.policy import Plateau


class EvaluationState(msgspec.Struct):
    """What evaluations have shown so far. All of it is durable.

    The best has the highest accuracy, and of equal ones, or without accuracies, the lowest loss. `reached` says
    which goal of training has been reached, if one has. The plateau looks at the `lowest` loss and at how many
    evaluations have `waited` for a lower one. `unjudged`: a person was told that nothing can be evaluated.
    """

    last: Evaluated | None = None
    best: Evaluated | None = None
    reached: str = ""
    learning_rate_factor: float = 1.0
    lowest: float = math.inf
    waited: int = 0
    unjudged: bool = False


class EvaluationTracker:
    """Judges evaluations of the model: the best so far, the end of training, a learning rate that falls."""

    def __init__(self, plateau: Plateau | None, stop: StopCondition) -> None:
        self.state = EvaluationState()
        self._plateau = plateau
        self._stop = stop

    def observe(self, evaluation: Evaluated) -> list[HubEffect]:
        """Judge an evaluation; the best version so far is to be saved."""
        state, stop = self.state, self._stop
        state.last = evaluation
        state.unjudged = False
        loss, accuracy = evaluation.loss, evaluation.accuracy
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        detail = f"version {evaluation.number}, loss {loss:.4g}{shown}"
        best = math.isfinite(loss) and (state.best is None or is_better(evaluation, state.best))
        effects: list[HubEffect] = [Report("evaluated", detail=f"{detail}, the best so far" if best else detail)]
        if best:
            state.best = evaluation
            effects.append(SaveBest(loss, accuracy))
        if stop.loss is not None and loss <= stop.loss:
            state.reached = f"loss {loss:.4g} is at most {stop.loss:g}"
        elif stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
            state.reached = f"accuracy {accuracy:.2%} is at least {stop.accuracy:.2%}"
        return effects + self._lower_learning_rate(loss)

    def warn_unjudged(self) -> list[HubEffect]:
        """Warn, once, if something waits for an evaluation that no device's loss stands for."""
        waits = [
            name
            for name, value in (("stop.loss", self._stop.loss), ("plateau", self._plateau))
            if value is not None
        ]
        if not waits or self.state.unjudged:
            return []
        self.state.unjudged = True
        detail = f"no device tells a loss, so {' and '.join(waits)} cannot be judged: give evaluation.data"
        return [Report("warning", detail=detail)]

    def _lower_learning_rate(self, loss: float) -> list[HubEffect]:
        """Count evaluations that are no better; lower the learning rate when there were too many."""
        state, plateau = self.state, self._plateau
        if plateau is None:
            return []
        if loss < state.lowest * (1.0 - plateau.improvement):
            state.lowest, state.waited = loss, 0
            return []
        state.waited += 1
        if state.waited < plateau.patience or state.learning_rate_factor <= plateau.factor_min:
            return []
        state.waited = 0
        state.learning_rate_factor = max(plateau.factor_min, state.learning_rate_factor * plateau.factor)
        left = f"{state.learning_rate_factor:.3g} of what was set"
        return [Report("plateau", detail=f"the server's learning rate is now {left}")]


def is_better(one: Evaluated, other: Evaluated) -> bool:
    """Return whether a version is better than another: by accuracy, or else, and of equal ones, by loss."""
    if one.accuracy is None or other.accuracy is None:
        return one.loss < other.loss
    return (-one.accuracy, one.loss) < (-other.accuracy, other.loss)
