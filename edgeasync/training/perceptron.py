"""A multilayer perceptron whose gradient function can be passed to `train`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import Arrays
from edgeasync.training.numpy_models import Array, backward, draw_weights, forward, layers_of, softmax_slope


class Perceptron:
    """A multilayer perceptron with ReLU layers.

    `widths` contains the number of features, the widths of the hidden layers, and the number of
    outputs. With one output, the model is a regression; otherwise, it is a classifier.
    """

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        self._classifies = widths[-1] > 1
        self.parameters: dict[str, Array] = {}
        for position, (inputs, outputs) in enumerate(pairwise(widths)):
            self.parameters[f"layer{position}.weight"] = np.zeros((inputs, outputs), np.float32)
            self.parameters[f"layer{position}.bias"] = np.zeros(outputs, np.float32)
        if len(widths) > 2:  # without hidden layers the loss is convex, so zeros suffice
            draw_weights(layers_of(self.parameters), seed)

    def gradient(self, arrays: Arrays, x: Array, y: Any) -> tuple[float, Arrays]:
        """Return the mean loss and its gradients.

        The loss of a classifier is the cross-entropy. That of a regression is half the squared
        error.
        """
        layers = layers_of(arrays)
        *inputs, scores = forward(layers, x)
        if self._classifies:
            loss = softmax_slope(scores, y)
        else:
            scores -= y.reshape(-1, 1)
            loss = float(np.square(scores).mean(dtype=np.float64)) / 2
            scores /= np.float32(len(y))
        gradients = {name: np.empty_like(array) for name, array in arrays.items()}
        backward(layers, inputs, scores, layers_of(gradients))
        return loss, gradients


def scores_of(arrays: Mapping[str, npt.NDArray[Any]], x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the outputs for each example, before any softmax, with shape (n, outputs)."""
    return forward(layers_of(arrays), x)[-1]
