"""Layers that contain layers: sequences and residual blocks."""

from dataclasses import dataclass
from typing import Any

from edgeasync.errors import ConfigError
from edgeasync.nn.graph import ElementType, LayerGraph, Value
from edgeasync.nn.layer import Layer


@dataclass(frozen=True, slots=True, init=False)
class Sequential(Layer):
    """A sequence of layers; each layer's output is the next one's input.

    Layers are named by position: the third layer of a model is named `2`, and the first layer
    inside it is named `2.0`. Raises `ConfigError` if the sequence is empty or contains an object
    that is not a layer.

    >>> from edgeasync import nn
    >>> nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    Sequential(layers=(Linear(in_features=64, out_features=32, bias=True), ReLU()))
    """

    layers: tuple[Layer, ...]

    def __init__(self, *layers: Layer) -> None:
        object.__setattr__(self, "layers", _checked("Sequential", layers))

    @property
    def input_type(self) -> ElementType | None:
        """The element type of the first layer that requires one."""
        return _first_type(self.layers)

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Build the layers in order."""
        prefix = f"{path}." if path else ""
        for place, layer in enumerate(self.layers):
            x = layer.place(graph, f"{prefix}{place}", x)
        return x


@dataclass(frozen=True, slots=True, init=False)
class Residual(Layer):
    """Add the input to the output of a sequence of layers (He et al. 2015, arXiv:1512.03385).

    If these layers change the shape, `shortcut` must be a layer that converts the input to the same
    shape. The layers are named `body.0`, `body.1`, ..., and the shortcut is named `shortcut`.
    Raises `ConfigError` if the body is empty, a part is not a layer, or body and shortcut differ in
    shape.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Residual(nn.Linear(64, 64), nn.ReLU()), (64,))
    """

    body: tuple[Layer, ...]
    shortcut: Layer | None

    def __init__(self, *body: Layer, shortcut: Layer | None = None) -> None:
        object.__setattr__(self, "body", _checked("Residual", body))
        if shortcut is not None:
            _checked("Residual", (shortcut,))
        object.__setattr__(self, "shortcut", shortcut)

    @property
    def input_type(self) -> ElementType | None:
        """The element type that the body requires."""
        return _first_type(self.body)

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Build the body and the shortcut, and add their results."""
        body = Sequential(*self.body).place(graph, f"{path}.body", x)
        shortcut = x if self.shortcut is None else self.shortcut.place(graph, f"{path}.shortcut", x)
        if (body.dims, body.type) != (shortcut.dims, shortcut.type):
            side = "input" if self.shortcut is None else "shortcut"
            raise ConfigError(
                f"{path} Residual got {x}; its body converts that to {body}, but its {side} is {shortcut}; "
                "use a shortcut with the same output shape as the body"
            )
        return Value(graph.node("Add", path, [body.name, shortcut.name]), body.dims, body.type)


def _first_type(layers: tuple[Layer, ...]) -> ElementType | None:
    return next((layer.input_type for layer in layers if layer.input_type is not None), None)


def _checked(owner: str, layers: tuple[Any, ...]) -> tuple[Layer, ...]:
    if not layers:
        raise ConfigError(f"{owner} has no layers; pass at least one")
    for place, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            hint = f"; use {layer.__name__}(...)" if isinstance(layer, type) else ""
            raise ConfigError(f"{owner}: {layer!r} at position {place} is not a layer{hint}")
    return layers
