"""Finds plugins and other user code by name among the modules installed on this machine.

A name is `package.module:Name`, or an entry point of an installed package. Messages from other
machines never name code.
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
    """Sets the tag of a plugin class to `module:Name`, by which it is found again."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        options.setdefault("tag_field", "kind")
        options.setdefault("tag", f"{namespace['__module__']}:{namespace['__qualname__']}")
        return super().__new__(mcls, name, bases, namespace, **options)


class Plugin(Section, frozen=True, metaclass=_Named):
    """Base class of your own policies. Its fields are the policy's keys in a settings file.

    Implement the methods of the policy's protocol. An instance is immutable, and its methods may
    depend only on the fields and the arguments, so that a replay repeats every decision. Annotate a
    field with `msgspec.Meta` to limit its values.

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
    """Protocol of your own codecs, which encode float32 values as bytes.

    The number of bytes depends only on the number of values. `decode` receives the bytes of
    `encode` and the number of values. Both may depend only on their arguments.

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
        """Whether devices must add what `encode` dropped to their next update (error feedback)."""

    def nbytes(self, length: int) -> int:
        """Return the encoded size of `length` values in bytes.

        It is at most 4 `length` + 32, and never smaller for more values.
        """

    def encode(self, values: Vector) -> bytes:
        """Encode finite values."""

    def decode(self, coded: npt.NDArray[np.uint8], length: int) -> Vector:
        """Return `length` float32 values; may raise any exception for invalid bytes."""


def check_name(name: str, key: str) -> None:
    """Raise `ValueError` unless `name` has the form `package.module:factory`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{key} {name!r} does not name code; use the form package.module:factory")


def is_name(text: str) -> bool:
    """Return whether `text` has the form `package.module:Name`."""
    return _NAME.fullmatch(text) is not None


def find_code(name: str, where: str) -> Callable[..., Any]:
    """Import the callable `name`.

    Raises `ConfigError`, whose message begins with `where`, if it is missing or not callable.
    Raises `PluginError` for a module in a run's folder. Exceptions of the module itself propagate.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = _import_outside_runs(module_name, where)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{where}: its module needs {missing}, which is not installed") from error
        raise ConfigError(
            f"{where}: no module {missing!r}; install its package beside edgeasync, or add its folder to "
            "PYTHONPATH, because the current folder is not searched"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{where}: {module_name} has no {path!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(f"{where}: {path} is {type(found).__name__}, not a function; name a function")
    code: Callable[..., Any] = found
    return code


_REFUSED: set[str] = set()
"""Folders of the runs that this process has opened."""

_INSTALLATION = [os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]


def refuse_modules_in(run: Path) -> None:
    """Never import modules from the run's folder in this process.

    The folder may be untrusted, so call this before you read anything from it.
    """
    _REFUSED.update((os.path.realpath(run), os.path.abspath(run)))  # noqa: PTH100 - links stay as they are


def _is_refused(place: str) -> bool:
    """Return whether a file is in a run's folder and not in Python's installation folders."""
    for path in map(Path, (os.path.realpath(place), os.path.abspath(place))):  # noqa: PTH100
        if any(path.is_relative_to(run) for run in _REFUSED):
            return not any(path.is_relative_to(folder) for folder in _INSTALLATION)
    return False


def _import_outside_runs(module_name: str, where: str) -> ModuleType:
    """Import a module and its parent packages.

    Raises `PluginError`, before any code runs, if one of them is in a run's folder.
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
                f"{where}: its module {refused} is in the folder of a run, and no code is imported from there; "
                "install its package, or move the module elsewhere"
            )
        found = importlib.import_module(name)
    return found


@lru_cache(maxsize=8)
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, cached after the first call."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """Return name and version of an entry point's package, or an empty text if unknown."""
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_class(name: str) -> type:
    """Import the class `name`; raises `PluginError` if that fails or it is not a class."""
    where = f"plugin {name}"
    if name.startswith("__main__:"):
        raise PluginError(f"{where}: is defined in the program itself; move the class to an importable module")
    try:
        found = find_code(name, where)
    except ConfigError as error:
        raise PluginError(str(error)) from error
    except Exception as error:
        raise PluginError(f"{where}: its module raised {type(error).__name__}: {error}; correct it") from error
    if not isinstance(found, type):
        raise PluginError(f"{where}: not a class; name a class")
    return found


def is_plugin(kind: str) -> bool:
    """Return whether a kind is `package.module:Name` or an installed entry point of a policy."""
    return is_name(kind) or kind in installed(POLICIES)


def find_policy(kind: str) -> type[Plugin] | None:
    """Import the policy plugin of a kind, or return `None` if the kind does not name a plugin.

    Raises `PluginError` if the class cannot be imported or is not a `Plugin`.
    """
    if not is_plugin(kind):
        return None
    name = kind if is_name(kind) else installed(POLICIES)[kind].value
    found = load_class(name)
    if not issubclass(found, Plugin):
        raise PluginError(
            f"plugin {name}: not a subclass of edgeasync.policies.Plugin; derive it, with frozen=True"
        )
    return found


class Trust(msgspec.Struct, frozen=True):
    """The plugins that a run's folder may name.

    - `known`: classes that the caller has already imported, by name.
    - `installed`: whether plugins with an entry point of an installed package are allowed.
    - `code`: whether all importable code outside the folder is allowed.
    """

    known: Mapping[str, type[Plugin]] = {}
    installed: bool = False
    code: bool = False

    def find_policy(self, kind: str) -> type[Plugin] | None:
        """Call the function `find_policy`; raises `PluginError` if the plugin is not allowed."""
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
        """Raise `PluginError` unless all code is allowed."""
        if not self.code:
            raise self.refusal(f"{where} {name}")

    def refusal(self, what: str) -> PluginError:
        """Return the error for a plugin that is not allowed."""
        instead = ", or name it in your own settings file" if self.installed else ""
        return PluginError(
            f"{what}: is code that only the run's folder names, so it is not imported; if you trust the folder, "
            f"allow it with trust_code=True (--trust-code){instead}"
        )


def name_of(plugin: type) -> str:
    """Return a class's name as `module:Name`."""
    return f"{plugin.__module__}:{plugin.__qualname__}"
