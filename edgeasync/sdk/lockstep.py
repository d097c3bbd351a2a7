"""A trainer that hands its local steps over to a loop of another thread."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.sdk.loop_model import LoopModel, Reading
from edgeasync.sdk.participants import Participant
from edgeasync.states import Table, check_move
from edgeasync.training.trainer import StepResult, StepsEndedError

Worker = Literal["busy", "awaits_step", "awaits_model", "gone"]

LOOP_WORKER: Table[Worker] = {
    "busy": ("awaits_step", "awaits_model", "gone"),
    "awaits_step": ("busy", "gone"),
    "awaits_model": ("busy", "gone"),
    "gone": (),
}

Turn = Literal["training", "handed_over", "waiting", "ended"]

LOOP_TURN: Table[Turn] = {
    "training": ("handed_over", "waiting", "ended"),
    "handed_over": ("waiting", "ended"),
    "waiting": ("training", "ended"),
    "ended": (),
}


class Lockstep:
    """A trainer whose steps the user's loop takes, in its own thread.

    The agent's worker asks for a step and waits. The loop takes one, hands it over, and waits until the worker
    asks again. Meanwhile an exchange may have taken place: then a new model is here. The loop's thread, and no
    other, reads the user's model, at the end of an assignment, and copies a new one into it (`LoopModel`).

    With an `ahead_max` above 0 the loop runs ahead of the worker by this number of steps, if its model can add
    what others have changed (`RunAhead`): it does not wait while the worker codes an update or installs a model.

    A peer's worker may ask for the model after any step: `each_step` reads it then. `keep` returns the state of
    the loop.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        participant: Participant,
        keep: Callable[[], TrainerState] = dict,
        *,
        ahead_max: int = 0,
        each_step: bool = False,
    ) -> None:
        self.model = LoopModel(spec, participant, ahead_max=ahead_max, each_step=each_step)
        """The loop's model."""
        self.restored: TrainerState | None = None
        """The state of an earlier start, if there is one."""
        self._keep = keep
        self._kept: TrainerState = {}
        self._turn = threading.Condition()
        self._worker: Worker = "busy"
        self._loop: Turn = "training"
        self._results: deque[StepResult] = deque()
        self._reading: Reading | None = None
        """The model as the loop has noted it for the worker."""
        self._has_filled = False
        """Whether the vector has had the loop's model since `begin`."""
        self._steps_beyond = 0
        """Steps that are in no update yet."""
        self._score: float | None = None
        self._resets = False

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""
        return self.model.spec

    @property
    def over(self) -> bool:
        """Whether the worker takes no more steps."""
        return self._worker == "gone" or self._loop == "ended"

    def _set_worker(self, state: Worker) -> None:
        if self._worker != "gone":
            check_move(LOOP_WORKER, self._worker, state, "the worker of a loop")
            self._worker = state
        self._turn.notify_all()

    def _set_loop(self, state: Turn) -> None:
        check_move(LOOP_TURN, self._loop, state, "a loop")
        self._loop = state

    # -- called by the agent's worker ------------------------------------------------------------------------

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: the loop copies this model at its next turn, or adds what has changed in it."""
        with self._turn:
            self._has_filled = False
            ahead = self.model.renew(parameters, whole=self._resets)
        adds = ahead is not None and ahead.prepare(parameters)
        with self._turn:
            self.model.offer(adds=adds)
            if not adds:  # what the loop has trained meanwhile does not count
                self._results.clear()
            self._turn.notify_all()

    def step(self) -> StepResult:
        """Wait for a step of the loop; raises `StepsEndedError` once there are no more."""
        with self._turn:
            self._set_worker("awaits_step")
            self._turn.wait_for(lambda: self._results or self.over)
            self._set_worker("busy")
            if self._results:
                return self._results.popleft()
        if self.model.runs_ahead:
            self._fill()  # the last update may be of steps that were taken before its model came
        raise StepsEndedError("the loop takes no more steps")

    def flush(self) -> None:
        """Wait until the loop has noted its model, then fill the vector; raises `StepsEndedError` without it.

        If the loop runs ahead, only an update needs its model: what it trains after that is never undone.
        """
        if not (self.model.runs_ahead and self._has_filled):
            self._fill()

    def _fill(self) -> None:
        with self._turn:
            if self.model.is_trained:
                self._set_worker("awaits_model")
                self._turn.wait_for(lambda: self._worker != "awaits_model")
                if self._reading is None:
                    raise StepsEndedError("the loop's model is out of reach")
            else:
                self._note_filled()
            reading, self._reading = self._reading, None
        if reading is not None:
            self.model.fill(reading)

    def reset(self) -> None:
        """Let the loop forget its optimizer's state with the next model."""
        with self._turn:
            self._resets = True

    def scale_learning_rate(self, factor: float) -> None:
        """Let the loop's steps count by this factor, in its own model, too."""
        with self._turn:
            self.model.factor = np.float32(factor)

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
            self._set_worker("gone")

    def state(self) -> TrainerState:
        """Return the state of the loop after the last step of an assignment: the loop waits here then."""
        with self._turn:
            # The loop has handed a step over, and counts it, until it waits.
            self._turn.wait_for(lambda: self._loop != "handed_over" or self.over)
            if self._loop == "waiting":
                self._kept = self._keep()
            return self._kept

    def restore(self, state: TrainerState) -> None:
        """Keep a state for the loop to resume from."""
        self.restored = state

    # -- called by the loop ----------------------------------------------------------------------------------

    def hand_over(self, result: StepResult, score: float | None = None) -> bool:
        """Give the worker a step; return whether it counts.

        A step that was taken before the loop had the worker's model does not.
        """
        with self._turn:
            if self.over or self.model.state == "absent":
                return False
            if not self.model.runs_ahead and (self._worker != "awaits_step" or self.model.is_new):
                return False
            self.model.note_step()
            self._results.append(result)
            self._steps_beyond += 1
            self._score = self._score if score is None else score
            if self._worker == "awaits_step":
                self._set_worker("busy")
            self._set_loop("handed_over")
            self._turn.notify_all()
            return True

    def updates_to_come(self) -> int:
        """Return how many answers the loop waits for at its end: of the update on its way, and of the last one."""
        with self._turn:
            return self._has_filled + (self._steps_beyond > 0)

    def end(self) -> None:
        """Take no more steps: the state is that after the loop's last one. Call `serve` until the worker ends."""
        with self._turn:
            self._kept = self._keep()
            self._set_loop("ended")
            self._turn.notify_all()

    def await_turn(self, timeout_s: float | None = None) -> bool:
        """Wait until the loop may take a step, and serve the worker; return whether the worker takes more."""
        with self._turn:
            self._set_loop("waiting")
            self._turn.notify_all()
            try:
                while True:
                    self._turn.wait_for(lambda: self._may_serve() or self._may_step() or self.over, timeout_s)
                    if not self._may_serve():
                        return self._may_step() and not self.over
                    self._serve()
            finally:
                self._set_loop("training")

    def _may_step(self) -> bool:
        if self._worker == "awaits_step":
            return True
        return self.model.runs_ahead and (self.model.is_new or len(self._results) < self.model.ahead_max)

    def _may_serve(self) -> bool:
        """Return whether the worker waits for the model, and that has what others have changed."""
        return self._worker == "awaits_model" and not self.model.is_new

    def _serve(self) -> None:
        self._reading = self.model.read()
        self._note_filled()
        self._set_worker("busy")

    def _note_filled(self) -> None:
        """Note that the vector has the loop's model: the first time after `begin` an update is made of it."""
        if not self._has_filled:
            self._has_filled, self._steps_beyond = True, 0

    def serve(self) -> None:
        """Note the model if the worker waits for that, without waiting."""
        with self._turn:
            if self._worker == "awaits_model" and self.model.is_new and self.model.runs_ahead:
                self.model.take()
            if self._may_serve():
                self._serve()

    def take_model(self) -> bool:
        """Copy a model that is new into the user's; return whether there was one.

        After `end` call this once the worker has ended, too.
        """
        with self._turn:
            may_take = self.model.runs_ahead or self._worker == "awaits_step" or self._loop == "ended"
            if not self.model.is_new or not may_take:
                return False
            self.model.take()
            if self._may_serve():
                self._serve()
            return True
