"""Loads user-defined code by name from this machine's installation. Peers cannot name code to load.

A name is `package.module:Name`, or the name of an entry point of an installed package.
"""

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.config import Section
from edgeasync.errors import ConfigError, PluginError
from edgeasync.parameters import Vector

POLICIES = "edgeasync.policies"
"""The entry point group of policies."""

CODECS = "edgeasync.codecs"
"""The entry point group of codecs."""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class _Named(msgspec.StructMeta):
    """Sets a struct's tag to its module and name, so that the class can be imported by its tag."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        options.setdefault("tag_field", "kind")
        options.setdefault("tag", f"{namespace['__module__']}:{namespace['__qualname__']}")
        return super().__new__(mcls, name, bases, namespace, **options)


class Plugin(Section, frozen=True, metaclass=_Named):
    """Base of a user-defined policy: a frozen struct whose fields are its keys in a settings file.

    A subclass implements the methods of a policy's protocol. Their results must depend only on the
    keys and the arguments, so that a replay makes the same decisions; the hub stores all state. To
    limit the values of a key, annotate it with `msgspec.Meta`.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin, Staleness
    >>> class Halving(Plugin, frozen=True):
    ...     strength: float = 1.0
    ...     def __call__(self, staleness: Staleness) -> float | None:
    ...         return 0.5 ** (self.strength * staleness.versions)
    >>> Policy(staleness=Halving(strength=2)).staleness
    Halving(strength=2)
    """


class Codec(Protocol):
    """A user-defined codec. The encoded size depends only on the number of float32 values.

    `decode` receives the bytes that `encode` returned, and the same `length`. Results must depend
    only on the arguments.

    >>> import numpy as np
    >>> class Halves:
    ...     needs_feedback = False
    ...     def nbytes(self, length):
    ...         return 2 * length
    ...     def encode(self, values):
    ...         return values.astype(np.float16).tobytes()
    ...     def decode(self, coded, length):
    ...         return coded.view(np.float16)
    >>> Halves().nbytes(10)
    20
    """

    @property
    def needs_feedback(self) -> bool:
        """Whether devices must add the part that the codec drops to their next update (error feedback)."""

    def nbytes(self, length: int) -> int:
        """Return the number of bytes of `length` encoded values.

        This may be at most 4 `length` + 32, and must be monotonic in `length`.
        """

    def encode(self, values: Vector) -> bytes:
        """Encode finite values."""

    def decode(self, coded: npt.NDArray[np.uint8], length: int) -> Vector:
        """Return `length` float32 values. May raise any exception for invalid bytes."""


def check_name(name: str, key: str) -> None:
    """Raise `ValueError` unless `name` has the form `package.module:Name`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{key} {name!r} does not name code; use package.module:factory")


def is_name(text: str) -> bool:
    """Return whether a text has the form `package.module:Name`."""
    return _NAME.fullmatch(text) is not None


def find_code(name: str, where: str) -> Callable[..., Any]:
    """Import a callable by name.

    Raises `ConfigError`, whose message starts with `where`, if the object is missing or not
    callable. Raises `PluginError` if the module is in a run's folder. Exceptions that the module
    itself raises are not caught.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = _import_outside_runs(module_name, where)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{where}: its module needs {missing}, which is not installed; install it"
            ) from error
        raise ConfigError(
            f"{where}: no module {missing!r}; install its package next to edgeasync, or add its folder to "
            "PYTHONPATH (the current folder is not searched)"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{where}: {module_name} has no {path!r}; correct the name")
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(
            f"{where}: is {type(found).__name__}, not a function; name a function that returns the object"
        )
    code: Callable[..., Any] = found
    return code


_REFUSED: set[str] = set()
"""Folders of runs that this process has opened, from which it does not import modules."""

_INSTALLATION = [os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]


def refuse_modules_in(run: Path) -> None:
    """Forbid this process to import modules from the folder of a run.

    The folder may come from an untrusted source. Call this before reading anything from it.
    """
    _REFUSED.update((os.path.realpath(run), os.path.abspath(run)))  # noqa: PTH100 - links stay as they are


def _is_refused(place: str) -> bool:
    """Return whether a file is in a run's folder, but not in a Python installation inside that folder."""
    for path in map(Path, (os.path.realpath(place), os.path.abspath(place))):  # noqa: PTH100
        if any(path.is_relative_to(run) for run in _REFUSED):
            return not any(path.is_relative_to(folder) for folder in _INSTALLATION)
    return False


def _import_outside_runs(module_name: str, where: str) -> ModuleType:
    """Import a module and its packages.

    Raises `PluginError` before running code in a run's folder.
    """
    names = module_name.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        known = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if known is None else known.__spec__
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        if spec is not None and spec.has_location and spec.origin is not None:
            places.append(spec.origin)
        if (refused := next(filter(_is_refused, places), None)) is not None:
            raise PluginError(
                f"{where}: its module {refused} is in the folder of a run, from which code is never imported; "
                "install its package, or move the module elsewhere"
            )
        found = importlib.import_module(name)
    return found


@lru_cache(maxsize=8)
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. The result is cached."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """Return the name and version of the package that defines an entry point."""
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_class(name: str) -> type:
    """Import a class by name. Raises `PluginError`, whose message contains the name."""
    where = f"plugin {name}"
    if name.startswith("__main__:"):
        raise PluginError(f"{where}: is in the main program; move the class to a module that can be imported")
    try:
        found = find_code(name, where)
    except ConfigError as error:
        raise PluginError(str(error)) from error
    except Exception as error:
        raise PluginError(
            f"{where}: its module raised {type(error).__name__}: {error}; correct the module"
        ) from error
    if not isinstance(found, type):
        raise PluginError(f"{where}: is not a class; name a class")
    return found


def is_plugin(kind: str) -> bool:
    """Return whether a kind has the form `package.module:Name`, or names an installed plugin."""
    return is_name(kind) or kind in installed(POLICIES)


def find_policy(kind: str) -> type[Plugin] | None:
    """Return the class of a policy plugin, or `None` if the kind is not a plugin.

    Raises `PluginError` if the plugin cannot be loaded.
    """
    if not is_plugin(kind):
        return None
    name = kind if is_name(kind) else installed(POLICIES)[kind].value
    found = load_class(name)
    if not issubclass(found, Plugin):
        raise PluginError(
            f"plugin {name}: not a subclass of edgeasync.policies.Plugin; derive a frozen class from it"
        )
    return found


class Trust(msgspec.Struct, frozen=True):
    """Plugins that may be imported although only the folder of a run names them.

    - `known`: classes that the caller has imported already, by name.
    - `installed`: whether entry points of installed packages may be imported.
    - `code`: whether any code outside the folder may be imported.
    """

    known: Mapping[str, type[Plugin]] = {}
    installed: bool = False
    code: bool = False

    def find_policy(self, kind: str) -> type[Plugin] | None:
        """Return the class of a policy plugin, or `None` if the kind is not a plugin.

        Raises `PluginError` for a plugin that is not trusted.
        """
        if kind in self.known:
            return self.known[kind]
        if self.code or not is_plugin(kind):
            return find_policy(kind)
        if self.installed:
            for name, point in installed(POLICIES).items():
                same_package = re.split(r"[.:]", point.value)[0] == re.split(r"[.:]", kind)[0]
                if kind == name or (same_package and name_of(load_class(point.value)) == kind):
                    return find_policy(point.value)
        raise self.refusal(f"plugin {kind}")

    def check_code(self, name: str, where: str) -> None:
        """Raise `PluginError` unless any code may be imported."""
        if not self.code:
            raise self.refusal(f"{where} {name}")

    def refusal(self, what: str) -> PluginError:
        """Return the error for code that is not trusted."""
        instead = ", or name it in your own settings file" if self.installed else ""
        return PluginError(
            f"{what}: only the run's folder names this code, so it is not imported; if you trust the folder, "
            f"set trust_code=True (--trust-code){instead}"
        )


def name_of(plugin: type) -> str:
    """Return the name by which a class can be loaded."""
    return f"{plugin.__module__}:{plugin.__qualname__}"
