"""The base class of layers, and checks of their arguments."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from edgeasync.errors import ConfigError
from edgeasync.nn.graph import ElementType, LayerGraph, Value


class Layer(ABC):
    """A description of one layer of a model: its arguments, and how to build its nodes.

    A layer contains no parameters; `build` creates them. So if a model contains the same object
    twice, it gets two layers with separate parameters.

    >>> from edgeasync import nn
    >>> isinstance(nn.ReLU(), nn.Layer), nn.ReLU() == nn.ReLU()
    (True, True)
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless integer arguments are at least 1 and flags are booleans."""
        for field in fields(self):  # type: ignore[arg-type]
            if field.type is int:
                self.check_integer(field.name, getattr(self, field.name))
            elif field.type is bool:
                self.check_flag(field.name, getattr(self, field.name))

    @property
    def input_type(self) -> ElementType | None:
        """The element type that the layer requires; None for any."""
        return "float32"

    @abstractmethod
    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add the layer's nodes and parameters with the prefix `path`, and return its result.

        Raises `ConfigError`, starting with the path, if the layer does not accept inputs of `x`'s
        shape.
        """

    def place(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Check `x`'s element type and build the layer. Raises `ConfigError`."""
        if self.input_type not in (None, x.type):
            raise self.mismatch(path, x, f"{self.input_type} values, not {x.type}")
        return self.build(graph, path, x)

    def mismatch(self, path: str, x: Value, wanted: str) -> ConfigError:
        """Return the error for an input of the wrong shape or type."""
        return ConfigError(f"{path} {type(self).__name__} got {x}, but needs {wanted}")

    def check_integer(self, name: str, value: object, least: int | None = 1) -> None:
        """Raise `ConfigError` unless `value` is an integer of at least `least`."""
        if not is_integer(value, least):
            limit = "" if least is None else f" of at least {least}"
            raise self.bad_argument(name, value, f"an integer{limit}")

    def check_number(self, name: str, value: object, low: float, high: float, range_: str) -> None:
        """Raise `ConfigError` unless low <= `value` < high. `range_` describes this in words."""
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
            raise self.bad_argument(name, value, f"a number {range_}")

    def check_flag(self, name: str, value: object) -> None:
        """Raise `ConfigError` unless `value` is True or False."""
        if not isinstance(value, bool):
            raise self.bad_argument(name, value, "True or False")

    def bad_argument(self, name: str, value: object, wanted: str) -> ConfigError:
        """Return the error for an invalid argument."""
        return ConfigError(f"{type(self).__name__}: {name} is {value!r}; pass {wanted}")

    def sizes(self, name: str, value: object, count: int, least: int) -> tuple[int, ...]:
        """Convert one integer, or a tuple of `count`, to `count` integers. Raises `ConfigError`."""
        values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count or not all(is_integer(each, least) for each in values):
            several = f" or a tuple of {count}" if count > 1 else ""
            raise self.bad_argument(name, value, f"an integer of at least {least}{several}")
        return tuple([int(each) for each in values])


def is_integer(value: object, least: int | None) -> bool:
    """Return whether `value` is an integer, but not a boolean, of at least `least`."""
    # Integral includes numpy's integers, such as results of np.prod.
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def glorot(inputs: int, outputs: int) -> float:
    """Return the uniform bound of Glorot & Bengio 2010, which preserves a layer's variance."""
    return math.sqrt(6.0 / (inputs + outputs))


def he(inputs: float) -> float:
    """Return the uniform bound of He et al. 2015 (arXiv:1502.01852) for ReLU layers."""
    return math.sqrt(6.0 / inputs)


def times(dims: Iterable[int]) -> str:
    """Format sizes, such as `3 x 4`."""
    return " x ".join(map(str, dims))
