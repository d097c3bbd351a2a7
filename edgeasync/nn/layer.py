"""The base class of layers, checks of their arguments, and initialization bounds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from edgeasync.errors import ConfigError
from edgeasync.nn.graph import ElementType, LayerGraph, Value


class Layer(ABC):
    """Base of all layers: an immutable description that adds its nodes to an ONNX graph.

    A layer stores no parameters. `build` creates them, so a layer object that appears twice in a
    model becomes two layers with separate parameters.

    >>> from edgeasync import nn
    >>> isinstance(nn.ReLU(), nn.Layer), nn.ReLU() == nn.ReLU()
    (True, True)
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless `int` fields are at least 1 and `bool` fields are booleans."""
        for field in fields(self):  # type: ignore[arg-type]
            if field.type is int:
                self.check_integer(field.name, getattr(self, field.name))
            elif field.type is bool:
                self.check_flag(field.name, getattr(self, field.name))

    @property
    def input_type(self) -> ElementType | None:
        """The element type that the layer accepts, or `None` if it accepts every type."""
        return "float32"

    @abstractmethod
    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add the layer's nodes and parameters under the name `path`; return its output.

        Raises `ConfigError`, which names the path, if the layer does not accept the shape of `x`.
        """

    def place(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Check the element type of `x`, then build the layer; raises `ConfigError`."""
        if self.input_type not in (None, x.type):
            raise self.mismatch(path, x, f"{self.input_type} values, not {x.type}")
        return self.build(graph, path, x)

    def mismatch(self, path: str, x: Value, wanted: str) -> ConfigError:
        """Return the error for an input that the layer does not accept."""
        return ConfigError(f"layer {path} ({type(self).__name__}): input is {x}, expected {wanted}")

    def check_integer(self, name: str, value: object, least: int | None = 1) -> None:
        """Raise `ConfigError` unless `value` is an integer and, with `least`, at least that."""
        if not is_integer(value, least):
            limit = "" if least is None else f" of {least} or more"
            raise self.bad_argument(name, value, f"an integer{limit}")

    def check_number(self, name: str, value: object, low: float, high: float, range_: str) -> None:
        """Raise `ConfigError` unless low <= `value` < high. `range_` is the range in words."""
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
            raise self.bad_argument(name, value, f"a number {range_}")

    def check_flag(self, name: str, value: object) -> None:
        """Raise `ConfigError` unless `value` is True or False."""
        if not isinstance(value, bool):
            raise self.bad_argument(name, value, "True or False")

    def bad_argument(self, name: str, value: object, wanted: str) -> ConfigError:
        """Return the error for an invalid argument; `wanted` describes valid ones."""
        return ConfigError(f"{type(self).__name__}: {name} is {value!r}; pass {wanted}")

    def sizes(self, name: str, value: object, count: int, least: int) -> tuple[int, ...]:
        """Return an integer, or a tuple of `count` integers, as such a tuple.

        Raises `ConfigError` for anything else, and for integers below `least`.
        """
        values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count or not all(is_integer(each, least) for each in values):
            several = f", or a tuple of {count}" if count > 1 else ""
            raise self.bad_argument(name, value, f"an integer of {least} or more{several}")
        return tuple([int(each) for each in values])


def is_integer(value: object, least: int | None) -> bool:
    """Return whether `value` is an integer, but no boolean, and at least `least` if that is set."""
    # Integral includes numpy's integers, such as the result of np.prod.
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def glorot(inputs: int, outputs: int) -> float:
    """Return the bound of the uniform initialization of Glorot & Bengio 2010."""
    return math.sqrt(6.0 / (inputs + outputs))


def he(inputs: float) -> float:
    """Return the bound of the uniform initialization of He et al. 2015 (arXiv:1502.01852)."""
    return math.sqrt(6.0 / inputs)


def times(dims: Iterable[int]) -> str:
    """Return sizes as text, such as `3 x 4`."""
    return " x ".join(map(str, dims))
