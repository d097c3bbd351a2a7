"""Arrays that stay on a device: they are part of the model only while its trainer runs.

All else that a device does with its model sees the hub's values there: an update, its codec's residual, the model
that is kept for a restart. So no message can hold a local value, and an update changes nothing there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgeasync.config import convert
from edgeasync.errors import ConfigError, ProtocolError, StorageError
from edgeasync.parameters import ParameterSpec, Vector

Patterns = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)]
"""Shell patterns over names of arrays."""

Arrays = dict[str, npt.NDArray[np.float32]]


class KeptLocal(Protocol):
    """Where a device keeps its local values: `durable.local_file.LocalFile` is one."""

    def read(self) -> Arrays:
        """Return what was kept; raises `StorageError`, or `ProtocolError` for what must be put aside."""

    def write(self, arrays: Arrays) -> None:
        """Keep these instead; raises `StorageError`."""

    def put_aside(self) -> object:
        """Make way, and return where what was kept is now; raises `StorageError`."""


def hubs_patterns(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return what the hub's settings name as local; raises `ConfigError` if that is no list of patterns."""
    model = settings.get("model")
    named = model.get("local", ()) if isinstance(model, Mapping) else ()
    return convert(named, Patterns, where="the hub's settings: model.local")


def choose_local(spec: ParameterSpec, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the arrays that patterns match.

    Raises `ConfigError` for a pattern that matches none, and if nothing would be left to share.
    """
    names = [parameter.name for parameter in spec.parameters]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"local: no array matches {pattern!r}; there are {_listed(names)}")
    chosen = tuple([name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)])
    if len(chosen) == len(names):
        raise ConfigError("local: matches all arrays of the model; leave at least one to share")
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


class LocalParameters:
    """A device's own values of some arrays of its hub's model.

    The arrays are those that match `patterns`, and those that the hub names. They begin with the hub's values.
    `open_kept` returns where the values outlive a restart; without it they do not.
    """

    def __init__(self, patterns: Sequence[str] = (), open_kept: Callable[[], KeptLocal] | None = None) -> None:
        self._patterns = tuple(patterns)
        self._open_kept = open_kept
        self._kept: KeptLocal | None = None
        self._spec: ParameterSpec | None = None
        self._names: tuple[str, ...] = ()
        self._warn: Callable[[str], None] = lambda _: None
        self._values: Arrays = {}

    def begin(self, spec: ParameterSpec, settings: Mapping[str, object], warn: Callable[[str], None]) -> None:
        """Choose the arrays of this model, by the hub's settings too, and recall what was kept of them.

        `warn` is given sentences for a person. Raises `ConfigError` for patterns that do not fit the model.
        """
        patterns = (*hubs_patterns(settings), *self._patterns)
        self._spec, self._warn = spec, warn
        self._names = choose_local(spec, patterns) if patterns else ()
        shapes = {p.name: p.shape for p in spec.parameters if p.name in self._names}
        if shapes and self._open_kept is not None and self._kept is None:
            self._kept = self._open_kept()
            self._values = self._recall(self._kept)
            if self._values and {name: array.shape for name, array in self._values.items()} != shapes:
                self._put_aside(self._kept, "of other arrays than those that are local now")
        self._values = {name: array for name, array in self._values.items() if shapes.get(name) == array.shape}

    def _recall(self, kept: KeptLocal) -> Arrays:
        """Return what an earlier start kept; what cannot be used costs a warning."""
        try:
            return kept.read()
        except StorageError as error:
            self._warn(f"{error}; the local parameters begin with the hub's values")
        except ProtocolError as error:
            self._put_aside(kept, str(error))
        return {}

    @contextmanager
    def in_place(self, parameters: Vector) -> Iterator[None]:
        """Put the local values into the model while the trainer runs, then take them out again."""
        if not self._names:
            yield
            return
        views = self._views(parameters)
        hubs = {name: view.copy() for name, view in views.items()}
        self.overlay(parameters)
        try:
            yield
        finally:
            trained = {name: view.copy() for name, view in views.items()}
            for name, view in views.items():
                view[...] = hubs[name]
            if all(np.isfinite(array).all() for array in trained.values()):  # else training had diverged
                self._values = trained

    def overlay(self, parameters: Vector) -> None:
        """Put the local values into a copy of the hub's model, to evaluate it."""
        values = self._values  # replaced as a whole by the thread that trains
        for name, view in self._views(parameters).items():
            if name in values:
                view[...] = values[name]

    def keep(self) -> None:
        """Write the values where they outlive a restart; raises `StorageError`."""
        if self._kept is not None and self._names:
            self._kept.write(self._values)

    def _views(self, parameters: Vector) -> Arrays:
        if self._spec is None or not self._names:
            return {}
        views = self._spec.views(parameters)
        return {name: views[name] for name in self._names}

    def _put_aside(self, kept: KeptLocal, reason: str) -> None:
        try:
            aside = kept.put_aside()
        except StorageError as error:
            self._warn(str(error))
        else:
            self._warn(f"{aside}: {reason}; put aside, and what does not fit begins with the hub's values")
