"""Code of somebody else's: found by name in this machine's installation. A peer names no code.

A name is `package.module:Name`, or one that an installed package has registered as an entry point.
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
"""The group of entry points that are policies."""

CODECS = "edgeasync.codecs"
"""The group of entry points that are codecs."""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class _Named(msgspec.StructMeta):
    """Gives a struct the tag by which it is found again: its module and its name there."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        options.setdefault("tag_field", "kind")
        options.setdefault("tag", f"{namespace['__module__']}:{namespace['__qualname__']}")
        return super().__new__(mcls, name, bases, namespace, **options)


class Plugin(Section, frozen=True, metaclass=_Named):
    """Base of a policy of your own: a frozen value, whose fields are its keys in a settings file.

    It has the methods of its part's protocol. All state is the hub's: what a method returns depends on nothing but
    the keys and the arguments, so that a replay decides the same. Annotate a key with `msgspec.Meta` to bound it.

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
    """A codec of your own: codes a number of float32 values in a number of bytes that depends on it alone.

    Give `decode` the bytes of `encode`, and the same `length`. Both depend on nothing but their arguments.

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
        """Whether so much is dropped that a device must add the dropped part to its next update."""

    def nbytes(self, length: int) -> int:
        """Return how many bytes `length` values take: 4 each and 32 at most, never fewer for more values."""

    def encode(self, values: Vector) -> bytes:
        """Return the bytes of finite values."""

    def decode(self, coded: npt.NDArray[np.uint8], length: int) -> Vector:
        """Return `length` values of float32; raises any exception for bytes that it cannot read."""


def check_name(name: str, key: str) -> None:
    """Raise `ValueError` unless `name` is that of code."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{key} {name!r} does not name code; write package.module:factory")


def is_name(text: str) -> bool:
    """Return whether a text has the form of a name of code."""
    return _NAME.fullmatch(text) is not None


def find_code(name: str, where: str) -> Callable[..., Any]:
    """Import what `name` names; raises `ConfigError`, beginning with `where`, if it is not there or not callable.

    Raises `PluginError` for a module in a run's folder. An exception of the module itself passes through.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = _import_outside_runs(module_name, where)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{where}: its module needs {missing}, which is not installed here") from error
        raise ConfigError(
            f"{where}: no module {missing!r}; install its package beside edgeasync, or name its folder in "
            "PYTHONPATH: the current folder is not searched"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{where}: {module_name} has no {path!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(f"{where}: is {type(found).__name__}, not a function; name one that returns the object")
    code: Callable[..., Any] = found
    return code


_REFUSED: set[str] = set()
"""Folders of runs that this process has opened."""

_INSTALLATION = [os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]


def refuse_modules_in(run: Path) -> None:
    """Import no module from the folder of a run, from now on in this process.

    A stranger may have made the folder. Call this before you read anything from it.
    """
    _REFUSED.update((os.path.realpath(run), os.path.abspath(run)))  # noqa: PTH100 - links stay as they are


def _is_refused(place: str) -> bool:
    """Return whether a file lies in the folder of a run. An installation in such a folder is not part of it."""
    for path in map(Path, (os.path.realpath(place), os.path.abspath(place))):  # noqa: PTH100
        if any(path.is_relative_to(run) for run in _REFUSED):
            return not any(path.is_relative_to(folder) for folder in _INSTALLATION)
    return False


def _import_outside_runs(module_name: str, where: str) -> ModuleType:
    """Import a module and its packages; raises `PluginError` before one in a run's folder would run."""
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
                f"{where}: its module {refused} is in the folder of a run, and no code is imported from there; "
                "install its package, or move the module elsewhere"
            )
        found = importlib.import_module(name)
    return found


@lru_cache(maxsize=8)
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, as they were when they were first asked for."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """Return the package that an entry point comes from, and its version."""
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_class(name: str) -> type:
    """Return the class that a name means; raises `PluginError`, which has the name."""
    where = f"plugin {name}"
    if name.startswith("__main__:"):
        raise PluginError(f"{where}: is in the program itself; move the class to a module that can be imported")
    try:
        found = find_code(name, where)
    except ConfigError as error:
        raise PluginError(str(error)) from error
    except Exception as error:
        raise PluginError(f"{where}: its module raised {type(error).__name__}: {error}; correct it") from error
    if not isinstance(found, type):
        raise PluginError(f"{where}: is no class; name a class of it")
    return found


def is_plugin(kind: str) -> bool:
    """Return whether a kind has the form of a plugin's name, or is one that an installed package has."""
    return is_name(kind) or kind in installed(POLICIES)


def find_policy(kind: str) -> type[Plugin] | None:
    """Return the class of a policy that is not edgeasync's own; `None` if the kind names no code.

    Raises `PluginError` for a name that leads to no plugin.
    """
    if not is_plugin(kind):
        return None
    name = kind if is_name(kind) else installed(POLICIES)[kind].value
    found = load_class(name)
    if not issubclass(found, Plugin):
        raise PluginError(f"plugin {name}: is no edgeasync.policies.Plugin; make it one, a frozen class")
    return found


class Trust(msgspec.Struct, frozen=True):
    """Which plugins may be imported because the folder of a run names them.

    - `known`: classes that the caller has imported already, by name.
    - `installed`: those that an installed package has registered as entry points.
    - `code`: all that can be found outside the folder.
    """

    known: Mapping[str, type[Plugin]] = {}
    installed: bool = False
    code: bool = False

    def find_policy(self, kind: str) -> type[Plugin] | None:
        """Do what the function `find_policy` does; raises `PluginError` for a plugin that may not be imported."""
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
        """Return the error that says how to trust what may not be imported."""
        instead = ", or name it in a settings file of your own" if self.installed else ""
        return PluginError(
            f"{what}: is code that only the run's folder names, so it is not imported; if you trust the folder, "
            f"allow it with trust_code=True (--trust-code){instead}"
        )


def name_of(plugin: type) -> str:
    """Return the name by which a class is found."""
    return f"{plugin.__module__}:{plugin.__qualname__}"
