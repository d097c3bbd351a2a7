"""Callable models that store values, built from layers, an ONNX file or an `onnx.ModelProto`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from edgeasync import losses, nn
from edgeasync.async_train.arrays import Array, as_array
from edgeasync.async_train.cuda import provider_of, usable
from edgeasync.async_train.shapes import input_shape_of
from edgeasync.errors import ModelMismatchError
from edgeasync.networks import Network

Arrays = Mapping[str, npt.NDArray[np.float32]]


class HeldNetwork:
    """A network that is built on first use, and rebuilt for examples of another shape."""

    def __init__(self, model: object, input_shape: Sequence[int] | None, seed: int) -> None:
        self.layers: object = model.layers if isinstance(model, HeldNetwork) else model
        """The layers, the path or the `onnx.ModelProto` that the model is built from."""
        self._shape = None if input_shape is None else tuple(input_shape)
        self._seed = seed
        self._provider: Literal["cpu", "cuda"] = "cpu"
        self._network: Network | None = None
        self._values: Arrays | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, also in another process, builds its own network.
        values = self._values if self._network is None else self.state_dict()
        return {**self.__dict__, "_network": None, "_values": values}

    @property
    def network(self) -> Network:
        """The network, built if necessary; raises `ConfigError` if the input shape is unknown."""
        if self._network is None:
            if self._shape is None and isinstance(self.layers, nn.Layer):
                self._shape = input_shape_of(self.layers)
            self._network = self._make_network(self._shape)
            if self._values is not None:
                _copy(self._values, self._network.arrays)
                self._values = None
        return self._network

    @property
    def device(self) -> str:
        """The device on which the model computes, `"cpu"` or `"cuda"`; `to` changes it."""
        return self._provider

    def fit_to(self, example: Sequence[int]) -> Network:
        """Return the network for examples of this shape, with the same values.

        Raises `ConfigError` if the layers do not accept the shape.
        """
        example = tuple(example)
        if isinstance(self.layers, nn.Layer):
            if self._shape is None:
                self._shape = input_shape_of(self.layers, usual=example)
            # Flat examples may represent images, but the order of their axes must match.
            same_rank = len(self._shape) == len(example)
            if math.prod(self._shape) != math.prod(example) or (same_rank and self._shape != example):
                network = self._make_network(example)
                if self._network is not None:
                    network.share(self._network)
                self._network, self._shape = network, example
        return self.network

    def _make_network(self, shape: tuple[int, ...] | None) -> Network:
        return Network(self.layers, shape, seed=self._seed, provider=self._provider)

    def state_dict(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return a copy of all values by name."""
        return {name: array.copy() for name, array in self.network.arrays.items()}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Load values by name; raises `ModelMismatchError` if names or shapes differ."""
        _copy(arrays, self.network.arrays)

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Serialize the ONNX model for inference with the current values."""
        return self.network.SerializeToString()


class Model(HeldNetwork):
    """A model that stores its values; `model(inputs)` returns scores.

    It can be passed as a model to every function and class of edgeasync.

    - `model`: layers of `edgeasync.nn`, the path of an ONNX file, or an `onnx.ModelProto`.
    - `input_shape`: the shape of one example; by default, it is derived from the layers or from the
      first data.
    - `seed`: the seed for the initial values.

    >>> from edgeasync.async_train import nn
    >>> model = nn.Model(nn.Linear(4, 2))
    >>> [array.shape for array in model.parameters()]
    [(2, 4), (2,)]
    """

    def __init__(self, model: object, *, input_shape: Sequence[int] | None = None, seed: int = 0) -> None:
        super().__init__(model, input_shape, seed)
        self.training = True
        self.gradient_sum: npt.NDArray[np.float32] | None = None
        """The sum of the gradients since the last `zero_grad`."""

    def __call__(self, inputs: npt.ArrayLike) -> Array:
        """Return the scores for inputs, computed with running statistics and without dropout."""
        values = np.asarray(inputs)
        scores = as_array(self.fit_to(values.shape[1:])(values))
        if self.training:
            scores.origin = self, values
        return scores

    def backward(self, inputs: npt.ArrayLike, targets: npt.ArrayLike, loss: losses.LossSetting) -> None:
        """Add a batch's gradient to `gradient_sum`, for the next `optimizer.step()`."""
        values = np.asarray(inputs)
        found = self.fit_to(values.shape[1:]).gradient(values, targets, loss).vector
        self.gradient_sum = found.copy() if self.gradient_sum is None else self.gradient_sum + found

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.gradient_sum = None

    def parameters(self) -> "Parameters":
        """Return the parameters, for an optimizer."""
        return Parameters(self)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - like torch
        """Set training mode, in which losses of the model's scores support `backward`."""
        self.training = mode
        return self

    def eval(self) -> Self:
        """Set evaluation mode."""
        return self.train(mode=False)

    def to(self, device: object) -> Self:
        """Compute on `device` from now on: `"cpu"`, or `"cuda"` if onnxruntime can use a GPU."""
        provider = provider_of(usable(device, self, "model.to"))
        if provider != self._provider:
            self._provider, made = provider, self._network
            if made is not None:
                self._network = self._make_network(self._shape)
                self._network.share(made)
        return self


class Sequential(Model):
    """A model of consecutive layers that stores their values.

    If a model is passed instead of a layer, its layers are used.

    >>> from edgeasync.async_train import nn
    >>> sorted(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).state_dict())
    ['1.bias', '1.weight']
    """

    def __init__(self, *layers: object, input_shape: Sequence[int] | None = None, seed: int = 0) -> None:
        parts: list[Any] = [layer.layers if isinstance(layer, HeldNetwork) else layer for layer in layers]
        super().__init__(nn.Sequential(*parts), input_shape=input_shape, seed=seed)


class Parameters:
    """Iterates over a model's trained arrays; an iteration builds the network if necessary."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __iter__(self) -> Iterator[Array]:
        network = self.model.network
        for parameter in network.spec.parameters:
            if parameter.role == "trained":
                yield network.arrays[parameter.name].view(Array)


def _copy(source: Arrays, target: Arrays) -> None:
    """Copy values by name; raises `ModelMismatchError` if names or shapes differ."""
    for name in sorted(source.keys() | target.keys()):
        shapes = [np.shape(arrays[name]) if name in arrays else None for arrays in (source, target)]
        if shapes[0] != shapes[1]:
            raise ModelMismatchError(f"array {name!r} has shape {shapes[0]}, but the model expects {shapes[1]}")
    for name, array in target.items():
        array[...] = source[name]
