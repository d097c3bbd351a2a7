"""Local parameters: arrays that are part of the model only while a device's trainer runs.

All other code on the device uses the hub's values of these arrays, for example in updates, in
residuals and in the model stored for a restart. So messages never contain local values, and updates
do not change these arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgeasync.config import convert
from edgeasync.errors import ConfigError, ProtocolError, StorageError
from edgeasync.parameters import ParameterSpec, Vector, matches

Patterns = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)]
"""Shell patterns that select arrays by name."""

Arrays = dict[str, npt.NDArray[np.float32]]


class KeptLocal(Protocol):
    """Storage for a device's local values, such as `durable.local_file.LocalFile`."""

    def read(self) -> Arrays:
        """Return the stored values.

        Raises `StorageError` if the values cannot be read, and `ProtocolError` if they are invalid.
        """

    def write(self, arrays: Arrays) -> None:
        """Replace the stored values. Raises `StorageError`."""

    def put_aside(self) -> object:
        """Rename the stored file and return its new location. Raises `StorageError`."""


def hubs_patterns(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return the local patterns in the hub's settings. Raises `ConfigError` if they are invalid."""
    model = settings.get("model")
    named = model.get("local", ()) if isinstance(model, Mapping) else ()
    return convert(named, Patterns, where="the hub's settings: model.local")


def choose_local(spec: ParameterSpec, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the arrays that at least one pattern matches.

    Raises `ConfigError` if a pattern matches no array, or if all arrays would be local.
    """
    names = [parameter.name for parameter in spec.parameters]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ConfigError(f"local: no array matches {pattern!r}; the arrays are {_listed(names)}")
    chosen = tuple([name for name in names if any(matches(name, pattern) for pattern in patterns)])
    if len(chosen) == len(names):
        raise ConfigError("local: the patterns match all arrays of the model; leave at least one to share")
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


class LocalParameters:
    """A device's own values of some arrays of the model.

    An array is local if its name matches one of the device's `patterns` or one of the hub's. The
    hub provides the initial values. `open_kept` opens the storage that preserves the local values
    across restarts; without it, a restart discards them.
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
        """Choose the local arrays of this model, and load their stored values.

        `warn` is called with messages for the user. Raises `ConfigError` if the patterns do not
        match the model.
        """
        patterns = (*hubs_patterns(settings), *self._patterns)
        self._spec, self._warn = spec, warn
        self._names = choose_local(spec, patterns) if patterns else ()
        shapes = {p.name: p.shape for p in spec.parameters if p.name in self._names}
        if shapes and self._open_kept is not None and self._kept is None:
            self._kept = self._open_kept()
            self._values = self._recall(self._kept)
            if self._values and {name: array.shape for name, array in self._values.items()} != shapes:
                self._put_aside(self._kept, "contains arrays that do not match the local parameters")
        self._values = {name: array for name, array in self._values.items() if shapes.get(name) == array.shape}

    def _recall(self, kept: KeptLocal) -> Arrays:
        """Return the values stored before a restart, or warn and return `{}` if they are unusable."""
        try:
            return kept.read()
        except StorageError as error:
            self._warn(f"{error}; the local parameters start with the hub's values")
        except ProtocolError as error:
            self._put_aside(kept, str(error))
        return {}

    @contextmanager
    def in_place(self, parameters: Vector) -> Iterator[None]:
        """Context manager: insert the local values, and restore the hub's values on exit."""
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
            if all(np.isfinite(array).all() for array in trained.values()):  # else training diverged
                self._values = trained

    def overlay(self, parameters: Vector) -> None:
        """Write the local values into `parameters`, a copy of the hub's model for evaluation."""
        values = self._values  # the training thread may replace the whole dict meanwhile
        for name, view in self._views(parameters).items():
            if name in values:
                view[...] = values[name]

    def keep(self) -> None:
        """Store the local values for the next start. Raises `StorageError`."""
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
            self._warn(f"{aside}: {reason}; renamed, and arrays that do not match start with the hub's values")
