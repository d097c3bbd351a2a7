"""The model of a loop of the user's own, and the vector in which its worker has it."""

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
"""Brings values that were noted to the vector."""


class LoopModel:
    """The loop's model beside the worker's vector: which of the two is ahead of the other.

    The loop's thread alone reads and writes the model. The worker's thread calls `renew`, `offer` and `fill`.
    `Lockstep` holds its lock around all calls but `fill`. With `each_step` the vector follows every step.
    """

    def __init__(self, spec: ParameterSpec, participant: Participant, *, ahead_max: int, each_step: bool) -> None:
        self.spec = spec
        self.state: Loop = "absent"
        self.factor = np.float32(1.0)
        """By which the loop's steps count."""
        self.ahead_max = ahead_max
        """By how many steps the loop may run ahead."""
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
        """Whether the vector has what the loop has yet to take."""
        return self.state in ("new", "apart")

    @property
    def is_trained(self) -> bool:
        """Whether the loop has taken steps that the vector lacks."""
        return self.state in ("trained", "apart")

    @property
    def runs_ahead(self) -> bool:
        """Whether the loop trains on while its worker is busy."""
        return self._ahead is not None

    # -- called for the worker -------------------------------------------------------------------------------

    def renew(self, vector: Vector, *, whole: bool) -> RunAhead | None:
        """Take the vector of the next assignment; a model that the loop has yet to take never comes.

        Return what can add its difference to the loop's model, unless that is to be replaced as a `whole`.
        """
        self._vector = vector
        if self.is_new:
            self._move("trained" if self.is_trained else "same")
        return None if whole or self.factor != 1.0 else self._ahead

    def offer(self, *, adds: bool) -> None:
        """Let the loop take the new vector; what it has trained meanwhile stays only if the vector `adds`."""
        if not adds:
            self._ahead = None
        self._move("apart" if adds and self.is_trained else "new")

    def fill(self, reading: Reading) -> None:
        """Bring what `read` has noted to the vector."""
        reading()
        if self._rounding is not None:
            self._rounding.undo(self._vector)
        if self._ahead is not None:
            self._ahead.note(self._vector)

    # -- called by the loop ----------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Note that the loop has taken a step that counts."""
        self._participant.note_step()
        self._move("apart" if self.is_new else "trained")
        if self._ahead is None and (self._each_step or self.factor != 1.0):
            self._read_step()

    def _read_step(self) -> None:
        """Read the model after a step. The vector has the model before it: let the step count by the factor."""
        trained = self._vector[: self.spec.trained_length]
        before = trained.copy() if self.factor != 1.0 else None
        self.fill(self.read())
        if before is not None:
            trained[:] = before + self.factor * (trained - before)
            self._write()

    def read(self) -> Reading:
        """Note the model's values as they are now."""
        reading = self._participant.begin_read(self.spec.views(self._vector))
        self._move("same")
        return reading

    def take(self) -> None:
        """Take what is new: add what others have changed, or copy all of it."""
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
