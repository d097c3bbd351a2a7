"""What a loop that runs ahead of its worker adds to its model after an exchange."""

import numpy as np

from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.sdk.participants import AddingParticipant


class RunAhead:
    """The model that a loop has trained on from, and what an exchange has changed in it since.

    The loop does not stop while a model is read, exchanged and installed. So the new model does not replace the
    loop's: the difference between the two models that the worker has seen is added, and what the loop has trained
    meanwhile stays. It is part of the next update. Statistics are replaced.

    The worker calls `note` and `prepare`, the loop `add`. One vector holds the model seen last, then the
    difference.
    """

    def __init__(self, spec: ParameterSpec, model: AddingParticipant, vector: Vector) -> None:
        """Begin with a vector that the loop's model has just loaded."""
        self._spec, self._model = spec, model
        self._held: Vector = vector.copy()
        self._is_difference = False

    def note(self, vector: Vector) -> None:
        """Note the loop's model as it was read."""
        np.copyto(self._held, vector)
        self._is_difference = False

    def prepare(self, vector: Vector) -> bool:
        """Let the next `add` lead to this model; return whether it can: not from one that is not finite."""
        if self._is_difference:
            return False
        trained = self._spec.trained_length
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(vector[:trained], self._held[:trained], out=self._held[:trained])
        # The sum of two differences could make a variance negative.
        self._held[trained:] = vector[trained:]
        self._is_difference = True
        pieces = (self._held[start : start + CHUNK] for start in range(0, len(self._held), CHUNK))
        if not all(np.isfinite(piece).all() for piece in pieces):
            return False
        self._model.stage(self._spec.views(self._held))
        return True

    def add(self) -> None:
        """Add what has changed to the loop's model."""
        self._model.add(self._spec.views(self._held))
