"""The form of a model: a `ParameterSpec` that names its arrays, and one flat float32 vector.

Gradients, deltas, momentum and snapshots are vectors of the same length. The named arrays are views
of them.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.errors import ModelMismatchError

Vector = npt.NDArray[np.float32]
"""A one-dimensional, C-contiguous float32 array."""

Arrays = Mapping[str, npt.NDArray[np.float32]]
"""The arrays of a model by name."""

PARAMETERS_MAX = 250_000_000
"""Maximum number of values in a model (1 GB). Larger models are rejected."""

CHUNK = 1 << 16
"""Number of values processed at a time. Three arrays of this length fit into the L2 cache of small machines.
"""

NAME_MAX = 256
"""Maximum length of a parameter's name."""

AXES_MAX = 8
"""Maximum number of axes of a parameter."""

Role = Literal["trained", "statistic"]
"""Updates change `trained` arrays. The hub averages `statistic` arrays (running values of batch norms)."""

_ROLES: tuple[Role, ...] = get_args(Role)


def matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a name.

    A name also matches itself, although a pattern would interpret brackets in it.

    >>> matches("head.weight", "head.*"), matches("layers[0].weight", "layers[0].weight")
    (True, True)
    """
    return name == pattern or fnmatchcase(name, pattern)


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One named array of a model: its name, shape, and role.

    The role is `"trained"` or `"statistic"`. A statistic is a running mean or variance, whose
    values the hub averages.

    >>> from edgeasync import Parameter
    >>> Parameter("weight", (64, 10)).role
    'trained'
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=2**40)], ...], msgspec.Meta(max_length=AXES_MAX)]
    role: Role = "trained"

    @property
    def size(self) -> int:
        """Number of float32 values in the array."""
        return math.prod(self.shape)


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The order, shapes and roles of a model's arrays inside one flat vector.

    Trained arrays precede statistics, so each role is one contiguous range. Raises `ValueError` for
    an unknown role, a repeated name, or a trained array after a statistic.

    >>> import numpy as np
    >>> from edgeasync import Parameter, ParameterSpec
    >>> spec = ParameterSpec((Parameter("weight", (3, 2)), Parameter("bias", (2,))))
    >>> spec.length
    8
    >>> spec.views(np.zeros(8, np.float32))["bias"]
    array([0., 0.], dtype=float32)
    """

    parameters: Annotated[tuple[Parameter, ...], msgspec.Meta(min_length=1, max_length=100_000)]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for parameter in self.parameters:
            if parameter.name in names:
                raise ValueError(f"parameter {parameter.name!r} appears twice")
            names.add(parameter.name)
            if parameter.role not in _ROLES:
                known = ", ".join(_ROLES)
                raise ValueError(
                    f"parameter {parameter.name!r} has the role {parameter.role!r}; choose from {known}"
                )
        roles = [parameter.role for parameter in self.parameters]
        if roles != sorted(roles, key=_ROLES.index):
            raise ValueError("trained parameters must come before statistics")

    @property
    def names(self) -> set[str]:
        """The names of all arrays."""
        return {parameter.name for parameter in self.parameters}

    @cached_property
    def length(self) -> int:
        """Number of values in the flat vector."""
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def trained_length(self) -> int:
        """Number of trained values, at the start of the vector; the rest are statistics."""
        return sum(parameter.size for parameter in self.parameters if parameter.role == "trained")

    @property
    def nbytes(self) -> int:
        """Size of the flat float32 vector in bytes."""
        return 4 * self.length

    @cached_property
    def _places(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """Name, start, end and shape of each array in the vector.

        They are cached because every local step needs them.
        """
        ends = list(accumulate(parameter.size for parameter in self.parameters))
        return [(p.name, end - p.size, end, p.shape) for p, end in zip(self.parameters, ends, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that identify the spec (truncated SHA-256)."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]

    @cached_property
    def layout(self) -> str:
        """The fingerprint of the arrays sorted by role and name, so it does not depend on their order."""
        return layout_of(self.parameters)

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # hashing all names and shapes would be slower than a small update

    def views(self, vector: Vector) -> dict[str, npt.NDArray[np.float32]]:
        """Return the named arrays as views of `vector`. Writing to a view changes the vector."""
        self.check(vector)
        return {name: vector[start:end].reshape(shape) for name, start, end, shape in self._places}

    def flatten(self, arrays: Mapping[str, npt.NDArray[np.float32]]) -> Vector:
        """Copy named arrays into a new flat vector.

        Raises `ModelMismatchError` if a name, shape or dtype differs from the spec.
        """
        if unknown := sorted(set(arrays) - {parameter.name for parameter in self.parameters}):
            raise ModelMismatchError(f"array {unknown[0]!r} is not part of this model")
        vector = np.empty(self.length, np.float32)
        for name, view in self.views(vector).items():
            if name not in arrays:
                raise ModelMismatchError(f"array {name!r} of the model is missing")
            if arrays[name].shape != view.shape:
                raise ModelMismatchError(f"array {name!r} has shape {arrays[name].shape}, expected {view.shape}")
            if arrays[name].dtype != np.float32:
                raise ModelMismatchError(f"array {name!r} is {arrays[name].dtype}, expected float32")
            view[...] = arrays[name]
        return vector

    def check(self, vector: Vector) -> None:
        """Raise `ModelMismatchError` unless `vector` is flat, float32 and of the right length."""
        if vector.dtype != np.float32 or vector.shape != (self.length,) or not vector.flags.c_contiguous:
            raise ModelMismatchError(
                f"expected a flat float32 vector of {self.length} values, got {vector.dtype} {vector.shape}"
            )


def layout_of(parameters: Iterable[Parameter]) -> str:
    """Return 32 hexadecimal digits that are equal for the same arrays in any order."""
    ordered = sorted(parameters, key=lambda parameter: (_ROLES.index(parameter.role), parameter.name))
    return ParameterSpec(tuple(ordered)).fingerprint


def first_difference(ours: ParameterSpec, theirs: ParameterSpec) -> str:
    """Describe the first difference of two specs."""
    for mine, other in zip_longest(ours.parameters, theirs.parameters):
        if mine != other:
            return f"{_describe(mine)} here, {_describe(other)} there"
    return "nothing"


def _describe(parameter: Parameter | None) -> str:
    return "no more arrays" if parameter is None else f"{parameter.name!r} {parameter.shape}, {parameter.role},"
