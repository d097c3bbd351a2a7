"""Adds the changes of an exchange to the model of a loop that runs ahead of its worker."""

import numpy as np

from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.sdk.participants import AddingParticipant


class RunAhead:
    """Adds the change from an exchange to the loop's model, instead of replacing the model.

    The loop keeps training while its model is read, exchanged and installed. If the new model
    replaced the loop's model, the steps taken in the meantime would be lost. Therefore the worker
    computes the difference between the model that it has read and the new model, and the loop adds
    this difference. The steps taken in the meantime become part of the next update. Statistics are
    replaced.

    The worker calls `note` and `prepare`, and the loop calls `add`. One vector first stores the
    model that the worker has read, and then the difference.
    """

    def __init__(self, spec: ParameterSpec, model: AddingParticipant, vector: Vector) -> None:
        """Start from a vector that the loop's model has just loaded."""
        self._spec, self._model = spec, model
        self._held: Vector = vector.copy()
        self._is_difference = False

    def note(self, vector: Vector) -> None:
        """Store the loop's model that the worker has read."""
        np.copyto(self._held, vector)
        self._is_difference = False

    def prepare(self, vector: Vector) -> bool:
        """Compute the difference to the new model `vector`; return `False` if it is not finite."""
        if self._is_difference:
            return False
        trained = self._spec.trained_length
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(vector[:trained], self._held[:trained], out=self._held[:trained])
        # Statistics are copied, because adding differences could make a variance negative.
        self._held[trained:] = vector[trained:]
        self._is_difference = True
        pieces = (self._held[start : start + CHUNK] for start in range(0, len(self._held), CHUNK))
        if not all(np.isfinite(piece).all() for piece in pieces):
            return False
        self._model.stage(self._spec.views(self._held))
        return True

    def add(self) -> None:
        """Add the difference to the loop's model."""
        self._model.add(self._spec.views(self._held))
