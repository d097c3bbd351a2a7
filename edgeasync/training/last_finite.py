"""Keeps a copy of the last finite model of a device without a hub, and puts it back when training diverges."""

import numpy as np

from edgeasync.parameters import Vector


class LastFinite:
    """A copy of the model after the last local step that left all values finite.

    Call `note_step` after each step, `note_mean` after each mean, and `keep` and `restore` between two steps, all
    in the training thread.
    """

    def __init__(self) -> None:
        self.copy: tuple[Vector, int] | None = None
        """The model, and after how many steps it was so."""
        self.is_restored = False
        """Whether the model was restored, and no step has been taken since."""
        self._is_of_step = True

    def note_step(self) -> None:
        """Note that a step has changed the model."""
        self._is_of_step, self.is_restored = True, False

    def note_mean(self) -> None:
        """Note that the model has moved to a mean. Training may diverge from there, so this model is not kept."""
        self._is_of_step = False

    def keep(self, parameters: Vector, steps: int) -> bool:
        """Copy the model if a step has left it finite; return whether it did."""
        if not self._is_of_step or not np.isfinite(parameters).all():
            return False
        self.copy = parameters.copy(), steps
        return True

    def restore(self, parameters: Vector) -> bool:
        """Replace a model that is not finite by the copy; return whether it did."""
        if self.copy is None or np.isfinite(parameters).all():
            return False
        parameters[:] = self.copy[0]
        self.is_restored = True
        return True
