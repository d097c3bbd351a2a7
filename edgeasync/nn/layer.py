"""What every layer is, and the checks of the arguments it is made with."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from edgeasync.errors import ConfigError
from edgeasync.nn.graph import ElementType, LayerGraph, Value


class Layer(ABC):
    """A description of one step of a model: its arguments, and how it becomes nodes.

    A layer holds no parameters: `build` makes them, so the same layer object in two places of a model stands
    for two layers of equal form.

    >>> from edgeasync import nn
    >>> isinstance(nn.ReLU(), nn.Layer), nn.ReLU() == nn.ReLU()
    (True, True)
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an argument that must be an integer of 1 or more, or a flag, and is none."""
        for field in fields(self):  # type: ignore[arg-type]
            if field.type is int:
                self.check_integer(field.name, getattr(self, field.name))
            elif field.type is bool:
                self.check_flag(field.name, getattr(self, field.name))

    @property
    def input_type(self) -> ElementType | None:
        """The type of element the layer takes; None if any."""
        return "float32"

    @abstractmethod
    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add the layer's nodes and parameters under the name `path`; return its result.

        Raises `ConfigError`, beginning with the path, if the layer does not take an input of `x`'s shape.
        """

    def place(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Build the layer after checking that it takes elements of `x`'s type; raises `ConfigError`."""
        if self.input_type not in (None, x.type):
            raise self.mismatch(path, x, f"{self.input_type} values, not {x.type}")
        return self.build(graph, path, x)

    def mismatch(self, path: str, x: Value, wanted: str) -> ConfigError:
        """Return the error that says where the layer is, what shape it got, and what it takes."""
        return ConfigError(f"{path} {type(self).__name__} got {x}; it takes {wanted}")

    def check_integer(self, name: str, value: object, least: int | None = 1) -> None:
        """Raise `ConfigError` unless `value` is an integer, of `least` or more if that is given."""
        if not is_integer(value, least):
            limit = "" if least is None else f" of {least} or more"
            raise self.bad_argument(name, value, f"an integer{limit}")

    def check_number(self, name: str, value: object, low: float, high: float, range_: str) -> None:
        """Raise `ConfigError` unless low <= `value` < high; `range_` is how a person says so."""
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
            raise self.bad_argument(name, value, f"a number {range_}")

    def check_flag(self, name: str, value: object) -> None:
        """Raise `ConfigError` unless `value` is True or False."""
        if not isinstance(value, bool):
            raise self.bad_argument(name, value, "True or False")

    def bad_argument(self, name: str, value: object, wanted: str) -> ConfigError:
        """Return the error for an argument that is not what the layer can be made with."""
        return ConfigError(f"{type(self).__name__}: {name} is {value!r}; give {wanted}")

    def sizes(self, name: str, value: object, count: int, least: int) -> tuple[int, ...]:
        """Return one integer, or a tuple of `count`, as `count` integers; raises `ConfigError`."""
        values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count or not all(is_integer(each, least) for each in values):
            several = f" or a tuple of {count}" if count > 1 else ""
            raise self.bad_argument(name, value, f"an integer of {least} or more{several}")
        return tuple([int(each) for each in values])


def is_integer(value: object, least: int | None) -> bool:
    """Return whether `value` is an integer, of `least` or more if that is given; a boolean is none."""
    # Integral also takes numpy's integers, which come out of np.prod.
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def glorot(inputs: int, outputs: int) -> float:
    """Return the bound of the uniform distribution of Glorot & Bengio 2010, which keeps a layer's variance."""
    return math.sqrt(6.0 / (inputs + outputs))


def he(inputs: float) -> float:
    """Return the bound of the uniform distribution of He et al. 2015 (arXiv:1502.01852), for rectified layers."""
    return math.sqrt(6.0 / inputs)


def times(dims: Iterable[int]) -> str:
    """Return sizes as people write them: `3 x 4`."""
    return " x ".join(map(str, dims))
