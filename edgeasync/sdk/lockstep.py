"""A trainer that leaves its local steps to the user's loop, which runs in another thread."""

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
    """A trainer whose steps the user's loop takes, in the loop's own thread.

    The agent's worker thread requests a step and waits. The loop takes one step, reports it, and
    waits until the worker requests the next step. Between two steps, an exchange may provide a new
    model. Only the loop's thread accesses the user's model: it reads the model at the end of an
    assignment, and copies new values into the model (`LoopModel`).

    If `ahead_max` is above 0 and the participant can add differences (`RunAhead`), the loop may run
    ahead of the worker by `ahead_max` steps. It then does not wait while the worker encodes an
    update or installs a model.

    With `each_step`, the model is read after every step, because a peer's worker may request it at
    any time. `keep` is a function that returns the loop's state.
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
        """The loop's model and the worker's vector."""
        self.restored: TrainerState | None = None
        """The state to resume from, if a state folder contained one."""
        self._keep = keep
        self._kept: TrainerState = {}
        self._turn = threading.Condition()
        self._worker: Worker = "busy"
        self._loop: Turn = "training"
        self._results: deque[StepResult] = deque()
        self._reading: Reading | None = None
        """A function that copies the values that the loop has recorded into the worker's vector."""
        self._has_filled = False
        """Whether the loop's model was copied into the vector since `begin`."""
        self._steps_beyond = 0
        """The number of steps that are not part of an update yet."""
        self._score: float | None = None
        self._resets = False

    @property
    def spec(self) -> ParameterSpec:
        """The parameters of the model."""
        return self.model.spec

    @property
    def over(self) -> bool:
        """Whether the worker or the loop has ended, so that no more steps follow."""
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
        """Begin an assignment with the new model `parameters`.

        The loop then copies the new model, or adds its difference from the previous model.
        """
        with self._turn:
            self._has_filled = False
            ahead = self.model.renew(parameters, whole=self._resets)
        adds = ahead is not None and ahead.prepare(parameters)
        with self._turn:
            self.model.offer(adds=adds)
            if not adds:  # steps that the loop took meanwhile do not count
                self._results.clear()
            self._turn.notify_all()

    def step(self) -> StepResult:
        """Wait until the loop has taken a step; raise `StepsEndedError` if it takes no more steps."""
        with self._turn:
            self._set_worker("awaits_step")
            self._turn.wait_for(lambda: self._results or self.over)
            self._set_worker("busy")
            if self._results:
                return self._results.popleft()
        if self.model.runs_ahead:
            self._fill()  # the last update may contain steps from before the new model arrived
        raise StepsEndedError("the loop takes no more steps")

    def flush(self) -> None:
        """Wait until the loop has recorded its model, and copy it into the worker's vector.

        If the loop runs ahead, its model is read only once per update. A second read would contain
        later steps. Raises `StepsEndedError` if the loop ends first.
        """
        if not (self.model.runs_ahead and self._has_filled):
            self._fill()

    def _fill(self) -> None:
        with self._turn:
            if self.model.is_trained:
                self._set_worker("awaits_model")
                self._turn.wait_for(lambda: self._worker != "awaits_model")
                if self._reading is None:
                    raise StepsEndedError("the loop ended before its model was read")
            else:
                self._note_filled()
            reading, self._reading = self._reading, None
        if reading is not None:
            self.model.fill(reading)

    def reset(self) -> None:
        """Request that the loop resets its optimizer's state when it loads the next model."""
        with self._turn:
            self._resets = True

    def scale_learning_rate(self, factor: float) -> None:
        """Scale the loop's steps by `factor`, in the worker's vector and in the loop's own model."""
        with self._turn:
            self.model.factor = np.float32(factor)

    def take_reset(self) -> bool:
        """Return whether a reset of the optimizer's state was requested, and clear the request."""
        with self._turn:
            resets, self._resets = self._resets, False
            return resets

    def take_score(self) -> float | None:
        """Return the score that the loop reported last, if there is one, and clear it."""
        with self._turn:
            score, self._score = self._score, None
            return score

    def interrupt(self) -> None:
        """Stop waiting for steps."""
        with self._turn:
            self._set_worker("gone")

    def state(self) -> TrainerState:
        """Return the loop's state after the last step of an assignment.

        If the loop does not wait, because it runs ahead or has ended, return the state that was
        recorded last.
        """
        with self._turn:
            # After it reports a step, the loop still updates its counters until it waits.
            self._turn.wait_for(lambda: self._loop != "handed_over" or self.over)
            if self._loop == "waiting":
                self._kept = self._keep()
            return self._kept

    def restore(self, state: TrainerState) -> None:
        """Store the state that the loop resumes from."""
        self.restored = state

    # -- called by the loop ----------------------------------------------------------------------------------

    def hand_over(self, result: StepResult, score: float | None = None) -> bool:
        """Report a step to the worker; return whether the step counts.

        A step does not count if it began before the loop had loaded the worker's model.
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
        """Return the number of answers from the hub that the loop can still expect.

        One answer is for the update in flight, and one for steps that are not part of an update yet.
        """
        with self._turn:
            return self._has_filled + (self._steps_beyond > 0)

    def end(self) -> None:
        """End the loop and record its state; the caller then calls `serve` until the worker ends."""
        with self._turn:
            self._kept = self._keep()
            self._set_loop("ended")
            self._turn.notify_all()

    def await_turn(self, timeout_s: float | None = None) -> bool:
        """Wait until the loop may take a step; return whether it may.

        The result is false if the worker or the loop has ended, or after `timeout_s`. While waiting,
        record the model whenever the worker needs it.
        """
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
        """Return whether the worker waits for the loop's model, and the loop has none to load."""
        return self._worker == "awaits_model" and not self.model.is_new

    def _serve(self) -> None:
        self._reading = self.model.read()
        self._note_filled()
        self._set_worker("busy")

    def _note_filled(self) -> None:
        """Record that the vector contains the loop's model.

        The worker computes its update from the first such vector after `begin`.
        """
        if not self._has_filled:
            self._has_filled, self._steps_beyond = True, 0

    def serve(self) -> None:
        """Record the model if the worker waits for it; otherwise return at once."""
        with self._turn:
            if self._worker == "awaits_model" and self.model.is_new and self.model.runs_ahead:
                self.model.take()
            if self._may_serve():
                self._serve()

    def take_model(self) -> bool:
        """Copy a new model into the user's model; return whether there was a new model.

        After `end`, call this method again once the worker has ended.
        """
        with self._turn:
            may_take = self.model.runs_ahead or self._worker == "awaits_step" or self._loop == "ended"
            if not self.model.is_new or not may_take:
                return False
            self.model.take()
            if self._may_serve():
                self._serve()
            return True
