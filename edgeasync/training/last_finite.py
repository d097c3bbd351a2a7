"""Keeps the last finite model of a device without a hub, to restore it when training diverges."""

import numpy as np

from edgeasync.parameters import Vector


class LastFinite:
    """A copy of the model after the last local step that left all values finite.

    Call `note_step` after each step, `note_mean` after each mean, and `keep` and `restore` between
    steps, all on the training thread.
    """

    def __init__(self) -> None:
        self.copy: tuple[Vector, int] | None = None
        """The model, and the number of steps it was trained for."""
        self.is_restored = False
        """Whether the model was restored, and no step has followed."""
        self._is_of_step = True

    def note_step(self) -> None:
        """Record that a step has changed the model."""
        self._is_of_step, self.is_restored = True, False

    def note_mean(self) -> None:
        """Record that the model is a new mean.

        It is not kept, because training may diverge from it.
        """
        self._is_of_step = False

    def keep(self, parameters: Vector, steps: int) -> bool:
        """Copy the model if a step has left it finite. Return whether it was copied."""
        if not self._is_of_step or not np.isfinite(parameters).all():
            return False
        self.copy = parameters.copy(), steps
        return True

    def restore(self, parameters: Vector) -> bool:
        """Replace a model that is not finite by the copy. Return whether it was replaced."""
        if self.copy is None or np.isfinite(parameters).all():
            return False
        parameters[:] = self.copy[0]
        self.is_restored = True
        return True
