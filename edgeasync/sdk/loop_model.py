"""The model of a user's loop, and the worker's vector with the same parameters."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.sdk.participants import AddingParticipant, Participant
from edgeasync.sdk.run_ahead import RunAhead
from edgeasync.states import Table, check_move
from edgeasync.training.rounding import Rounding

Loop = Literal["absent", "new", "same", "trained", "apart"]

LOOP_MODEL: Table[Loop] = {
    "absent": ("new",),
    "new": ("same", "apart"),
    "same": ("new", "trained"),
    "trained": ("same", "new", "apart"),
    "apart": ("trained",),
}

Reading = Callable[[], None]
"""A function that copies recorded values into the vector."""


class LoopModel:
    """The loop's model, the worker's vector, and the state that shows which of the two is newer.

    Only the loop's thread reads and writes the model. The worker's thread calls `renew`, `offer`
    and `fill`. `Lockstep` holds its lock during all calls except `fill`. With `each_step`, the
    vector is updated after every step.
    """

    def __init__(self, spec: ParameterSpec, participant: Participant, *, ahead_max: int, each_step: bool) -> None:
        self.spec = spec
        self.state: Loop = "absent"
        self.factor = np.float32(1.0)
        """The factor by which the loop's steps are scaled."""
        self.ahead_max = ahead_max
        """Maximum number of steps that the loop may run ahead of the worker."""
        self._participant = participant
        self._each_step = each_step
        self._vector: Vector = np.empty(0, np.float32)
        self._rounding: Rounding | None = None
        self._ahead: RunAhead | None = None

    def _move(self, state: Loop) -> None:
        check_move(LOOP_MODEL, self.state, state, "the model of a loop")
        self.state = state

    @property
    def is_new(self) -> bool:
        """Whether the vector contains changes that the loop has not loaded."""
        return self.state in ("new", "apart")

    @property
    def is_trained(self) -> bool:
        """Whether the loop has taken steps that the vector does not contain."""
        return self.state in ("trained", "apart")

    @property
    def runs_ahead(self) -> bool:
        """Whether the loop keeps training while its worker is busy."""
        return self._ahead is not None

    # -- called for the worker -------------------------------------------------------------------------------

    def renew(self, vector: Vector, *, whole: bool) -> RunAhead | None:
        """Set the vector of the next assignment.

        If the loop has not loaded the previous model yet, that model is dropped. Return an object
        that can add the difference to the loop's model, or `None` if the loop must load the whole
        model, for example because `whole` is set.
        """
        self._vector = vector
        if self.is_new:
            self._move("trained" if self.is_trained else "same")
        return None if whole or self.factor != 1.0 else self._ahead

    def offer(self, *, adds: bool) -> None:
        """Offer the new vector to the loop.

        If `adds` is true, the loop adds a difference to its model. Otherwise the new vector
        replaces the model, and steps that the loop has taken in the meantime are lost.
        """
        if not adds:
            self._ahead = None
        self._move("apart" if adds and self.is_trained else "new")

    def fill(self, reading: Reading) -> None:
        """Copy the values recorded by `read` into the vector."""
        reading()
        if self._rounding is not None:
            self._rounding.undo(self._vector)
        if self._ahead is not None:
            self._ahead.note(self._vector)

    # -- called by the loop ----------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Record a step of the loop that counts."""
        self._participant.note_step()
        self._move("apart" if self.is_new else "trained")
        if self._ahead is None and (self._each_step or self.factor != 1.0):
            self._read_step()

    def _read_step(self) -> None:
        """Read the model after a step, and scale the step by `factor`."""
        trained = self._vector[: self.spec.trained_length]
        before = trained.copy() if self.factor != 1.0 else None
        self.fill(self.read())
        if before is not None:
            trained[:] = before + self.factor * (trained - before)
            self._write()

    def read(self) -> Reading:
        """Record the model's current values."""
        reading = self._participant.begin_read(self.spec.views(self._vector))
        self._move("same")
        return reading

    def take(self) -> None:
        """Load new values: add other devices' changes, or copy the whole vector."""
        if self._ahead is not None:
            self._ahead.add()
            self._move("trained" if self.is_trained else "same")
            return
        self._write()
        self._move("same")
        may_run_ahead = self.ahead_max > 0 and self.factor == 1.0 and not self._participant.rounds
        if may_run_ahead and isinstance(self._participant, AddingParticipant):
            self._ahead = RunAhead(self.spec, self._participant, self._vector)

    def _write(self) -> None:
        views = self.spec.views
        self._participant.write(views(self._vector))
        self._rounding = None
        if self._participant.rounds:
            self._rounding = Rounding(self._vector, lambda values: self._participant.read(views(values)))
