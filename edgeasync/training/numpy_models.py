"""Classifiers in plain numpy, for small devices and simulations.

A softmax regression is a multilayer perceptron without hidden layers, so the two models share their
code. The loss is the mean softmax cross-entropy. Hidden layers use ReLU. Arrays are float32.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType

from edgeasync.config import Section
from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError
from edgeasync.metrics import Meter
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.training.local_parameters import Patterns

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Layers = list[tuple[Array, Array]]
"""Weight and bias of each layer, in the order of the layers."""

_Width = Annotated[int, Meta(ge=1, le=2**24)]
_Classes = Annotated[int, Meta(ge=2, le=2**24)]


class _Classifier(Section, frozen=True, dict=True):
    """A stack of layers that maps `widths[0]` features to the scores of `widths[-1]` classes."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features, the widths of the hidden layers, and the number of classes."""
        raise NotImplementedError

    @cached_property
    def spec(self) -> ParameterSpec:
        """`layerN.weight` (inputs, outputs) and `layerN.bias` (outputs,), in order."""
        parameters = []
        for layer, shape in enumerate(pairwise(self.widths)):
            parameters += [Parameter(f"layer{layer}.weight", shape), Parameter(f"layer{layer}.bias", shape[1:])]
        return ParameterSpec(tuple(parameters))

    def initial(self, seed: int) -> Vector:
        """Return initial parameters: normally distributed weights and zero biases.

        Weights are scaled as in He et al. 2015 (arXiv:1502.01852). Without hidden layers, all
        values are zero, which is sufficient because the loss is convex.
        """
        vector = np.zeros(self.spec.length, np.float32)
        if len(self.widths) > 2:
            draw_weights(self._layers(vector), seed)
        return vector

    def check_data(self, dataset: Dataset) -> None:
        """Raise `DataError` unless the flattened features and the labels match the model."""
        inputs, classes = self.widths[0], self.widths[-1]
        features = math.prod(dataset.x.shape[1:])
        if features != inputs:
            raise DataError(
                f"the data has {features} features, but the hub's model expects {inputs}; use data with the same "
                "features as the other devices"
            )
        if dataset.y.dtype.kind != "i" or dataset.y.ndim != 1:
            raise DataError("targets are invalid: the hub's model expects one class number (integer) per example")
        if (label := int(dataset.y.max())) >= classes:
            raise DataError(
                f"label {label} is out of range: the hub's model has {classes} classes; use labels from 0 to "
                f"{classes - 1}"
            )

    def gradient(self, parameters: Vector, x: Array, y: Labels, out: Vector, meter: Meter | None = None) -> float:
        """Write the gradient of the batch's mean loss to `out` and return the loss.

        If `meter` is set, add the scores to it.
        """
        layers = self._layers(parameters)
        try:
            *inputs, scores = forward(layers, x)
            if meter is not None:
                meter.add(scores, y)
            loss = softmax_slope(scores, y)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise DataError(
                f"a batch does not match the model ({error}); use batches with {self.widths[0]} features per "
                f"example, and one label per example, from 0 to {self.widths[-1] - 1}"
            ) from error
        backward(layers, inputs, scores, self._layers(out))
        return loss

    def scores(self, parameters: Vector, x: Array) -> Array:
        """Return the scores of each example before the softmax, (n, classes)."""
        return forward(self._layers(parameters), x)[-1]

    def predict(self, parameters: Vector, x: Array) -> Labels:
        """Return the most likely class of each example, int64 (n,)."""
        classes: Labels = self.scores(parameters, x).argmax(axis=1).astype(np.int64, copy=False)
        return classes

    def _layers(self, vector: Vector) -> Layers:
        # Created for each step. This takes microseconds, and a cache would keep vectors alive.
        return layers_of(self.spec.views(vector))


class SoftmaxModel(_Classifier, frozen=True, tag_field="kind", tag="softmax", dict=True, kw_only=True):
    """Softmax regression: one linear layer from `inputs` features to `classes` scores."""

    inputs: _Width
    """Number of features per example: the product of the example's axis sizes."""
    classes: _Classes
    """Number of classes. Labels are from 0 to `classes` - 1."""
    local: Patterns | UnsetType = UNSET
    """Names of arrays that stay on each device: `layer0.weight`, `layer0.bias`. See [Local
    parameters](/train/local.md).
    """

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features and the number of classes."""
        return self.inputs, self.classes


class MlpModel(_Classifier, frozen=True, tag_field="kind", tag="mlp", dict=True, kw_only=True):
    """A multilayer perceptron with ReLU layers of the widths `hidden`."""

    inputs: _Width
    """Number of features per example: the product of the example's axis sizes."""
    hidden: Annotated[tuple[_Width, ...], Meta(min_length=1, max_length=8)] = (64,)
    """Widths of the hidden layers."""
    classes: _Classes
    """Number of classes. Labels are from 0 to `classes` - 1."""
    local: Patterns | UnsetType = UNSET
    """Names of arrays that stay on each device: `layer0.weight`, `layer0.bias`, `layer1.weight` and
    so on. `["layer1.*"]` selects the head of a network with one hidden layer. See [Local
    parameters](/train/local.md).
    """

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features, the widths of the hidden layers, and the number of classes."""
        return self.inputs, *self.hidden, self.classes


Model = SoftmaxModel | MlpModel
"""Any model of this module. Settings select it by `kind`."""


def layers_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Layers:
    """Group named arrays by layer: return the weight and bias of each layer, in order."""
    values = list(arrays.values())
    return list(zip(values[::2], values[1::2], strict=True))


def draw_weights(layers: Layers, seed: int) -> None:
    """Draw random weights for ReLU layers."""
    generator = np.random.Generator(np.random.PCG64(seed))
    for weight, _ in layers:
        generator.standard_normal(dtype=np.float32, out=weight)
        # A ReLU halves the variance, but the last layer has no ReLU.
        gain = 1.0 if weight is layers[-1][0] else 2.0
        np.multiply(weight, np.float32(math.sqrt(gain / len(weight))), out=weight)


def forward(layers: Layers, x: Array) -> list[Array]:
    """Return the inputs of all layers, followed by the scores (n, classes)."""
    arrays = [x.reshape(len(x), -1)]
    for position, (weight, bias) in enumerate(layers):
        product = arrays[-1] @ weight
        product += bias
        if position < len(layers) - 1:
            np.maximum(product, np.float32(0.0), out=product)
        arrays.append(product)
    return arrays


def softmax_slope(scores: Array, y: Labels) -> float:
    """Replace the scores by the gradient of the mean cross-entropy, and return the loss."""
    rows = np.arange(len(y))
    # Subtract the maximum, so that the exponentials cannot overflow.
    scores -= scores.max(axis=1, keepdims=True)
    true_scores = scores[rows, y]
    np.exp(scores, out=scores)
    sums = scores.sum(axis=1, keepdims=True)
    loss = float((np.log(sums[:, 0]) - true_scores).mean(dtype=np.float64))
    scores /= sums
    scores[rows, y] -= 1.0
    scores /= np.float32(len(y))
    return loss


def backward(layers: Layers, inputs: list[Array], slope: Array, gradients: Layers) -> None:
    """Write the layers' gradients.

    `slope` is the gradient of the loss with respect to the scores.
    """
    for position in reversed(range(len(layers))):
        weight_gradient, bias_gradient = gradients[position]
        np.matmul(inputs[position].T, slope, out=weight_gradient)
        slope.sum(axis=0, out=bias_gradient)
        if position:
            slope = slope @ layers[position][0].T
            slope *= inputs[position] > 0.0
