"""A trainer that hands its local steps over to a loop of another thread."""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.sdk.participants import AddingParticipant, Participant, begin_read, note_step, rounds
from edgeasync.sdk.run_ahead import RunAhead
from edgeasync.training.rounding import Rounding
from edgeasync.training.trainer import StepResult, StepsEndedError


class Lockstep:
    """A trainer whose steps the user's loop takes, in its own thread.

    The agent's worker asks for a step and waits. The loop takes one, hands it over, and waits until the worker
    asks again. Meanwhile an exchange may have taken place: then a new model is here. The loop's thread, and no
    other, reads the user's model, at the end of an assignment, and copies a new one into it.

    With an `ahead_max` above 0 the loop runs ahead of the worker by this number of steps, if its model can add
    what others have changed (`RunAhead`): it does not wait while the worker codes an update or installs a model.

    A peer's worker may ask for the model after any step: `each_step` reads it then.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        keep: Callable[[], TrainerState],
        *,
        ahead_max: int = 0,
        each_step: bool = False,
    ) -> None:
        self.spec = spec
        self._keep = keep
        self._each_step = each_step
        self._state: TrainerState = {}
        self._turn = threading.Condition()
        self._vector: Vector | None = None
        self._rounding: Rounding | None = None
        self._factor = np.float32(1.0)
        self._results: deque[StepResult] = deque()
        self._steps_beyond = 0
        """Steps that are in no update yet."""
        self._score: float | None = None
        self.over = False
        """Whether the worker takes no more steps."""
        self._asked = self._fresh = self._handed = self._waiting = self._resets = self._ended = False
        self._has_filled = self._unread = self._flushing = self._interrupted = False
        self._filled: Callable[[], None] | None = None
        self.ahead_max = ahead_max
        """By how many steps the loop may run ahead."""
        self._ahead: RunAhead | None = None
        self.restored: TrainerState | None = None
        """The state of an earlier start, if there is one."""

    # -- called by the agent's worker ------------------------------------------------------------------------

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: the loop copies this model at its next turn, or adds what has changed in it."""
        with self._turn:
            self._vector, self._fresh, self._has_filled = parameters, False, False
            ahead = None if self._resets or self._factor != 1.0 else self._ahead
        adds = ahead is not None and ahead.prepare(parameters)
        with self._turn:
            if not adds:  # what the loop has trained meanwhile does not count
                self._ahead = None
                self._results.clear()
                self._unread = False
            self._fresh = True
            self._turn.notify_all()

    def step(self) -> StepResult:
        """Wait for a step of the loop; raises `StepsEndedError` once there are no more."""
        with self._turn:
            self._asked = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._results or self.over)
            self._asked = False
            if self._results:
                self._turn.notify_all()
                return self._results.popleft()
        if self._ahead is not None:
            self._fill()  # the last update may be of steps that were taken before its model came
        raise StepsEndedError("the loop takes no more steps")

    def flush(self) -> None:
        """Wait until the loop has noted its model, then fill the vector; raises `StepsEndedError` without it.

        If the loop runs ahead, only an update needs its model: what it trains after that is never undone.
        """
        if self._ahead is None or not self._has_filled:
            self._fill()

    def _fill(self) -> None:
        with self._turn:
            if self._unread:
                self._flushing = True
                self._turn.notify_all()
                self._turn.wait_for(lambda: not self._flushing or self._interrupted)
                if self._flushing:
                    raise StepsEndedError("the loop's model is out of reach")
            else:
                self._note_filled()
            filled, self._filled = self._filled, None
        if filled is None:
            return
        assert self._vector is not None
        filled()
        if self._rounding is not None:
            self._rounding.undo(self._vector)
        if self._ahead is not None:
            self._ahead.note(self._vector)

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
            self.over = self._interrupted = True
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
        """Give the worker a step; return whether it counts.

        A step that was taken before the loop had the worker's model does not.
        """
        with self._turn:
            if self._vector is None or self.over:
                return False
            if self._ahead is None and (not self._asked or self._fresh):
                return False
            note_step(model)
            self._unread = True
            if self._ahead is None and (self._each_step or self._factor != 1.0):
                self._read_step(model, self._vector)
            self._asked, self._handed = False, True
            self._results.append(result)
            self._steps_beyond += 1
            self._score = self._score if score is None else score
            self._turn.notify_all()
            return True

    def _read(self, model: Participant) -> Callable[[], None]:
        """Note the model's values as they are now."""
        assert self._vector is not None
        self._unread = False
        return begin_read(model, self.spec.views(self._vector))

    def _read_step(self, model: Participant, vector: Vector) -> None:
        """Read the model after a step. The vector has the model before it: let the step count by the factor."""
        before = vector[: self.spec.trained_length].copy() if self._factor != 1.0 else None
        self._read(model)()
        if self._rounding is not None:
            self._rounding.undo(vector)
        if before is not None:
            trained = vector[: self.spec.trained_length]
            trained[:] = before + self._factor * (trained - before)
            self._write(model, vector)

    def updates_to_come(self) -> int:
        """Return how many answers the loop waits for at its end: of the update on its way, and of the last one."""
        with self._turn:
            return self._has_filled + (self._steps_beyond > 0)

    def end(self) -> None:
        """Take no more steps: the state is that after the loop's last one. Call `serve` until the worker ends."""
        with self._turn:
            self._state, self._ended, self.over = self._keep(), True, True
            self._turn.notify_all()

    def await_turn(self, model: Participant, timeout_s: float | None = None) -> bool:
        """Wait until the loop may take a step, and serve the worker; return whether the worker takes more."""
        with self._turn:
            self._waiting, self._handed = True, False
            self._turn.notify_all()
            while True:
                self._turn.wait_for(lambda: self._may_serve() or self._may_step() or self.over, timeout_s)
                if not self._may_serve():
                    break
                self._serve(model)
            self._waiting = False
            return self._may_step() and not self.over

    def _may_step(self) -> bool:
        if self._ahead is None:
            return self._asked
        return self._asked or self._fresh or len(self._results) < self.ahead_max

    def _may_serve(self) -> bool:
        """Return whether the worker waits for the model, and that has what others have changed."""
        return self._flushing and not self._fresh and not self._interrupted

    def _serve(self, model: Participant) -> None:
        self._filled, self._flushing = self._read(model), False
        self._note_filled()
        self._turn.notify_all()

    def _note_filled(self) -> None:
        """Note that the vector has the loop's model: the first time after `begin` an update is made of it."""
        if not self._has_filled:
            self._has_filled, self._steps_beyond = True, 0

    def serve(self, model: Participant) -> None:
        """Note the model if the worker waits for that, without waiting."""
        with self._turn:
            if self._flushing:
                self._add()
            if self._may_serve():
                self._serve(model)

    def _add(self) -> None:
        """Add what others have changed, if the loop runs ahead."""
        if self._fresh and self._ahead is not None:
            self._ahead.add()
            self._fresh = False

    def take_model(self, model: Participant) -> bool:
        """Copy a model that is new into the user's; return whether there was one.

        After `end` call this once the worker has ended, too.
        """
        with self._turn:
            if not self._fresh or self._vector is None:
                return False
            self._add()
            if self._fresh:
                if not (self._asked or self._ended):
                    return False
                self._write(model, self._vector)
                self._fresh = False
                may_run_ahead = self.ahead_max > 0 and self._factor == 1.0 and not rounds(model)
                if may_run_ahead and isinstance(model, AddingParticipant):
                    self._ahead = RunAhead(self.spec, model, self._vector)
            if self._may_serve():
                self._serve(model)
            return True

    def _write(self, model: Participant, vector: Vector) -> None:
        """Copy the worker's model into the user's."""
        model.write(self.spec.views(vector))
        self._rounding = None
        if rounds(model):
            self._rounding = Rounding(vector, lambda values: model.read(self.spec.views(values)))
