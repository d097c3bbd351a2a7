"""Backs up the last finite model in a hub-less run, to restore it if training diverges."""

import numpy as np

from edgeasync.parameters import Vector


class LastFinite:
    """Keeps a copy of the model, taken after a local step that left all values finite.

    Call `note_step` after each local step and `note_mean` after each averaging with peers. Call
    `keep` and `restore` between steps. All calls must be made on the training thread.
    """

    def __init__(self) -> None:
        self.copy: tuple[Vector, int] | None = None
        """The copied model, and the number of steps for which it was trained."""
        self.is_restored = False
        """Whether the model was restored and no step has been taken since."""
        self._is_of_step = True

    def note_step(self) -> None:
        """Record that a step has changed the model."""
        self._is_of_step, self.is_restored = True, False

    def note_mean(self) -> None:
        """Record that the model was replaced by an average with peers.

        `keep` does not copy such a model, because training may diverge in the next step.
        """
        self._is_of_step = False

    def keep(self, parameters: Vector, steps: int) -> bool:
        """Copy the model if a local step has left all its values finite.

        Return whether it was copied.
        """
        if not self._is_of_step or not np.isfinite(parameters).all():
            return False
        self.copy = parameters.copy(), steps
        return True

    def restore(self, parameters: Vector) -> bool:
        """If the model is not finite, replace it by the copy. Return whether it was replaced."""
        if self.copy is None or np.isfinite(parameters).all():
            return False
        parameters[:] = self.copy[0]
        self.is_restored = True
        return True
