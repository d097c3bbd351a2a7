"""A trainer that hands its local steps over to a loop of another thread."""

import threading
from collections.abc import Callable

import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.sdk.participants import Participant, rounds
from edgeasync.training.rounding import Rounding
from edgeasync.training.trainer import StepResult, StepsEndedError


class Lockstep:
    """A trainer whose steps the user's loop takes, in its own thread.

    The agent's worker asks for a step and waits. The loop takes one, hands it over, and waits until the worker
    asks again. Meanwhile an exchange may have taken place: then a new model is here. The loop's thread, and no
    other, copies it into the user's model.
    """

    def __init__(self, spec: ParameterSpec, keep: Callable[[], TrainerState]) -> None:
        self.spec = spec
        self._keep = keep
        self._state: TrainerState = {}
        self._turn = threading.Condition()
        self._vector: Vector | None = None
        self._rounding: Rounding | None = None
        self._factor = np.float32(1.0)
        self._result: StepResult | None = None
        self._score: float | None = None
        self.over = False
        """Whether the worker takes no more steps."""
        self._asked = self._fresh = self._handed = self._waiting = self._resets = self._ended = False
        self.restored: TrainerState | None = None
        """The state of an earlier start, if there is one."""

    # -- called by the agent's worker ------------------------------------------------------------------------

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: the loop copies this model at its next turn."""
        with self._turn:
            self._vector, self._fresh = parameters, True

    def step(self) -> StepResult:
        """Wait for a step of the loop; raises `StepsEndedError` once there are no more."""
        with self._turn:
            self._asked = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._result is not None or self.over)
            self._asked = False
            result, self._result = self._result, None
            if result is None:
                raise StepsEndedError("the loop takes no more steps")
            return result

    def reset(self) -> None:
        """Let the loop forget its optimizer's state with the next model."""
        with self._turn:
            self._resets = True

    def scale_learning_rate(self, factor: float) -> None:
        """Let the loop's steps count by this factor, in its own model, too."""
        with self._turn:
            self._factor = np.float32(factor)

    def take_reset(self) -> bool:
        """Return whether the optimizer's state is to be forgotten, once."""
        with self._turn:
            resets, self._resets = self._resets, False
            return resets

    def take_score(self) -> float | None:
        """Return the score of the model after the last step, if the loop has said one since the last update."""
        with self._turn:
            score, self._score = self._score, None
            return score

    def interrupt(self) -> None:
        """Wait for no more steps."""
        with self._turn:
            self.over = True
            self._turn.notify_all()

    def state(self) -> TrainerState:
        """Return the state of the loop after the last step of an assignment: the loop waits here then."""
        with self._turn:
            # The loop has handed a step over, and counts it, until it waits.
            self._turn.wait_for(lambda: self._waiting or not self._handed or self.over)
            if self._waiting:
                self._state = self._keep()
            return self._state

    def restore(self, state: TrainerState) -> None:
        """Keep a state for the loop to resume from."""
        self.restored = state

    # -- called by the loop ----------------------------------------------------------------------------------

    def hand_over(self, result: StepResult, model: Participant, score: float | None = None) -> bool:
        """Give the worker a step, and the model after it; return whether the worker waited for one.

        A step that was taken before the loop had the worker's model does not count.
        """
        with self._turn:
            if not self._asked or self._fresh or self._vector is None or self.over:
                return False
            before = self._vector[: self.spec.trained_length].copy() if self._factor != 1.0 else None
            model.read(self.spec.views(self._vector))
            if self._rounding is not None:
                self._rounding.undo(self._vector)
            if before is not None:
                trained = self._vector[: self.spec.trained_length]
                trained[:] = before + self._factor * (trained - before)
                self._write(model, self._vector)
            self._asked, self._result, self._handed = False, result, True
            self._score = self._score if score is None else score
            self._turn.notify_all()
            return True

    def end(self) -> None:
        """Take no more steps: the state is that after the loop's last one."""
        with self._turn:
            self._state, self._ended = self._keep(), True
        self.interrupt()

    def await_turn(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker asks for a step; return whether it does, and has not ended."""
        with self._turn:
            self._waiting, self._handed = True, False
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._asked or self.over, timeout_s)
            self._waiting = False
            return self._asked and not self.over

    def take_model(self, model: Participant) -> bool:
        """Copy a model that is new into the user's; return whether there was one.

        After `end` call this once the worker has ended, too.
        """
        with self._turn:
            if not self._fresh or not (self._asked or self._ended) or self._vector is None:
                return False
            self._write(model, self._vector)
            self._fresh = False
            return True

    def _write(self, model: Participant, vector: Vector) -> None:
        """Copy the worker's model into the user's."""
        model.write(self.spec.views(vector))
        self._rounding = None
        if rounds(model):
            self._rounding = Rounding(vector, lambda values: model.read(self.spec.views(values)))
