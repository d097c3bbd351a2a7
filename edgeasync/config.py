"""Reads settings from TOML into frozen structs. Error messages contain the path of the key.

A settings class is a frozen `msgspec.Struct` with `forbid_unknown_fields`. This module contains the
code that all settings classes share: it reads files, parses sizes such as `"64 MiB"`, and formats
error messages.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect as types

from edgeasync.errors import ConfigError, PluginError
from edgeasync.structs import resolve_type

Settings = TypeVar("Settings")
Given = TypeVar("Given")

SIZE_DIGITS_MAX = 19
"""Maximum number of digits in a byte count. Python rejects integers with thousands of digits."""

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_UNKNOWN_KEY = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_KIND = "Object missing required field `kind`"
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
"""Matches one step of a path in msgspec's messages: a key, or a list index."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table in a settings file. It is frozen, and unknown keys are errors."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """Hints for keys that users may write into this table although they belong to another one."""

    GROUPS: ClassVar[Mapping[str, str]] = {}
    """Maps the first key of each group of flags to the group's title in `--help`."""

    INSTEAD: ClassVar[Mapping[str, str]] = {}
    """Pairs of mutually exclusive keys. If a flag sets one of them, the other one in the file is ignored."""


class ByteCount(int):
    """A number of bytes; in TOML an integer or a string such as `"64 MiB"` or `"500 kB"`."""

    @classmethod
    def parse(cls, value: object) -> "ByteCount":
        """Parse a size. Raises `ValueError`, which lists the units."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?i?B)\s*", value)):
            number, unit = match.groups()
            if unit in _UNITS and len(number) <= SIZE_DIGITS_MAX:
                return cls(Fraction(number) * _UNITS[unit])
        raise ValueError(f"{value!r} is not a size; use bytes or one of {', '.join(_UNITS)} as in '64 MiB'")

    @property
    def words(self) -> str:
        """The size as text, in the largest unit that gives an integer.

        >>> ByteCount(1 << 26).words, ByteCount(1_500_000).words
        ('64 MiB', '1500 kB')
        """
        unit = max(
            (name for name, size in _UNITS.items() if self and self % size == 0),
            key=_UNITS.__getitem__,
            default="B",
        )
        return f"{self // _UNITS[unit]} {unit}"


class FilePath(str):
    """A path in a settings file.

    A relative path becomes absolute when it is read, so a later `chdir` does not change its
    meaning.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> "FilePath":
        """Parse a path. Raises `ValueError`."""
        if not isinstance(value, str | Path):
            raise ValueError(f"expected `str`, got `{type(value).__name__}`")  # noqa: TRY004 - msgspec's wording
        try:
            return cls(expanded(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None


def whole_path(given: Given) -> Given:
    """Make a path, or each path in a list, absolute. Return other values unchanged.

    Call this when a caller passes a path, because the program may change its working directory
    later.
    """
    found: Any = given
    if isinstance(given, str | Path):
        found = expanded(given)
    elif isinstance(given, list):
        found = [whole_path(one) for one in given]
    return cast("Given", found)


def expanded(path: str | Path) -> Path:
    """Return an absolute path, with a leading `~` expanded.

    Call this as soon as a caller passes a path, and store the result. Raises `ConfigError` if the
    home folder is unknown, or the working directory no longer exists.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{path}: unknown home folder; use an absolute path") from None
    except OSError:
        raise ConfigError(
            f"{path}: the working directory was deleted; change to another one, or use an absolute path"
        ) from None


def whole_address(address: str, folder: Path | None = None) -> str:
    """Make the path of an `ipc://PATH` address absolute, relative to `folder` or the cwd.

    >>> whole_address("ipc:///run/hub"), whole_address("ipc://@name"), whole_address("tcp://10.0.0.1:5555")
    ('ipc:///run/hub', 'ipc://@name', 'tcp://10.0.0.1:5555')
    """
    transport, _, place = address.partition("://")
    if transport != "ipc" or not place or place.startswith("@") or place == "*":
        return address  # an abstract socket name, or a path that ZeroMQ chooses
    return f"ipc://{expanded(place if folder is None else folder / Path(place).expanduser())}"


def read_toml(path: Path, settings: type[Settings]) -> Settings:
    """Read a TOML file into `settings`. Raises `ConfigError`, which names the file, the key and a remedy."""
    return parse_toml(read_bytes(path), settings, where=str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a settings file. Raises `ConfigError`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; pass the path of a TOML settings file") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; pass the path of a TOML settings file"
        ) from error


def parse_toml(content: bytes, settings: type[Settings], *, where: str) -> Settings:
    """Parse TOML into `settings`. Raises `ConfigError`, whose message starts with `where`."""
    try:
        table = tomllib.loads(content.decode())
        nul = _path_of_nul(table)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    if nul is not None:
        raise ConfigError(f"{where}: {nul}: contains a NUL character; remove it")
    return convert(table, settings, where=where)


def _path_of_nul(value: object, path: str = "") -> str | None:
    """Return the path of a string that contains a NUL, or `None`.

    A NUL would truncate a file name.
    """
    if isinstance(value, str):
        return path if "\0" in value else None
    inside: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        inside = ((f"{path}.{key}" if path else key, one) for key, one in value.items())
    elif isinstance(value, list):
        inside = ((f"{path}[{index}]", one) for index, one in enumerate(value))
    return next((found for place, one in inside if (found := _path_of_nul(one, place)) is not None), None)


def convert(
    table: object, settings: type[Settings], *, where: str, find: Callable[[str], type | None] | None = None
) -> Settings:
    """Convert plain tables and values to `settings`.

    `find` returns the plugin class for a kind. By default, every plugin that a table names is
    imported. Raises `ConfigError`, whose message starts with `where`.
    """
    try:
        return msgspec.convert(table, resolve_type(settings), dec_hook=partial(_decode, find=find), str_keys=True)
    except msgspec.ValidationError as error:
        kind = PluginError if isinstance(error.__cause__, _NoPluginError) else ConfigError
        raise kind(f"{where}: {_explain(str(error), table, settings)}") from error
    except PluginError as error:
        raise PluginError(f"{where}: {error}") from error


def to_table(settings: object) -> Any:
    """Convert settings to plain tables and values, as in TOML."""
    return msgspec.to_builtins(settings, enc_hook=_encode)


def _encode(value: object) -> int | str:
    return str(value) if isinstance(value, FilePath) else int(cast("ByteCount", value))


class Kinds(NamedTuple):
    """The valid kinds of a key whose type is a protocol: edgeasync's own kinds, and those of plugins.

    `own` is a union of tagged sections. `find` returns the class of a plugin by its `kind`, or
    `None`. `installed` returns the names of installed plugins.
    """

    own: Any
    find: Callable[[str], type | None]
    installed: Callable[[], Iterable[str]]


class _NoPluginError(ValueError):
    """A plugin is not available. msgspec adds the path of the key that names it."""


_KINDS: dict[type, Kinds] = {}
_EXPLAINED = "\0"
"""Marks an error message that already contains a path, relative to the table that was being read."""


def declare_kinds(protocol: type, kinds: Kinds) -> None:
    """Register the kinds of a protocol. Called by the module that defines them."""
    _KINDS[protocol] = kinds


def installed_kinds(protocol: type) -> list[str]:
    """Return the kinds of a protocol that installed plugins provide."""
    return list(_KINDS[protocol].installed())


def kinds_of(described: types.Type) -> types.Type:
    """Return edgeasync's implementations if a type is a protocol, and any other type unchanged."""
    if isinstance(described, types.CustomType) and described.cls in _KINDS:
        return types.type_info(_KINDS[described.cls].own)
    return described


def _decode(wanted: type, value: object, find: Callable[[str], type | None] | None = None) -> object:
    if wanted is ByteCount:
        return ByteCount.parse(value)
    if wanted is FilePath:
        return FilePath.parse(value)
    if wanted in _KINDS:
        kinds = _KINDS[wanted]
        return _read_kind(kinds if find is None else kinds._replace(find=find), value)
    raise NotImplementedError(f"no reader for {wanted}")


def _read_kind(kinds: Kinds, table: object) -> object:
    """Convert a table to the settings class of its `kind`. Raises `ValueError`."""
    kind = table.get("kind") if isinstance(table, Mapping) else None
    settings = kinds.own
    if isinstance(table, Mapping) and isinstance(kind, str) and kind not in _tags(kinds.own):
        try:
            plugin = kinds.find(kind)
        except PluginError as error:
            raise _NoPluginError(_EXPLAINED + str(error)) from error
        if plugin is not None:
            settings, table = plugin, {**table, "kind": plugin.__struct_config__.tag}  # type: ignore[attr-defined]
    try:
        return msgspec.convert(
            table, resolve_type(settings), dec_hook=partial(_decode, find=kinds.find), str_keys=True
        )
    except msgspec.ValidationError as error:
        more = list(kinds.installed()) if settings is kinds.own else []
        unknown = settings is kinds.own and isinstance(kind, str) and kind not in _tags(kinds.own)
        words = _explain(str(error), table, settings, more)
        if unknown:
            words += f"{' If' if words.endswith('?') else '; if'} it is a plugin's, install its package"
        raise ValueError(_EXPLAINED + words) from error


@lru_cache(maxsize=32)
def _tags(own: Any) -> frozenset[str]:
    return frozenset(str(part.tag) for part in _parts(types.type_info(own)) if isinstance(part, types.StructType))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question that suggests the names most similar to `word`, or "" if none is similar."""
    near = find_near(word, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


SUGGESTIONS_MAX = 3
_WORDS = re.compile("[-_]")
WORD_MAX = 100
"""Maximum length of a word for which similar words are searched. For longer words, this would take
too long.
"""

LETTERS_A_MISTAKE = 4
"""One mistake is allowed per this number of letters in a word. The first letter must be correct."""


def find_near(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that `word` misspells or is a part of, most similar first."""
    found = []
    if len(word) > WORD_MAX:
        return []
    for other in dict.fromkeys(known):
        mistakes = _count_mistakes(word.lower(), other.lower())
        begins = min(len(word), len(other)) > 2 and (other.startswith(word) or word.startswith(other))
        parts = _WORDS.split(word)
        begins = begins or (len(parts) > 1 and set(parts) <= {*_WORDS.split(other)})
        few = word[:1].lower() == other[:1].lower() and mistakes <= max(1, len(word) // LETTERS_A_MISTAKE)
        if begins or few:
            found.append((mistakes, other))
    return [other for _, other in sorted(found, key=itemgetter(0))[:SUGGESTIONS_MAX]]


def _count_mistakes(word: str, other: str) -> int:
    """Return the number of letters in `word` that are missing, superfluous, wrong or swapped."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for place, letter in enumerate(word, 1):
        before, above, row = row, before, [place]
        for column, wanted in enumerate(other, 1):
            count = min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != wanted))
            if place > 1 and column > 1 and word[place - 2 : place] == other[column - 2 : column][::-1]:
                count = min(count, above[column - 2] + 1)
            row.append(count)
    return row[-1]


def find_tables(key: str, settings: type) -> list[str]:
    """Return the paths of all tables that may contain `key`; "" is the top level of the file."""
    found: dict[str, None] = {}

    def look(kind: types.Type, path: str) -> None:
        for part in _parts(kind):
            if isinstance(part, types.VarTupleType):
                look(part.item_type, path)
            if isinstance(part, types.StructType):
                for field in part.fields:
                    if field.encode_name == key:
                        found[path] = None
                    look(field.type, f"{path}.{field.encode_name}" if path else field.encode_name)

    look(types.type_info(settings), "")
    return list(found)


def _explain(message: str, table: object, settings: type, more: Iterable[str] = ()) -> str:
    """Convert msgspec's ``... - at `$.hub.stop` `` to ``hub.stop: ...``, on one line.

    For an unknown key or kind, adds the most similar names, or all valid ones if none is similar.
    `more` contains valid kinds that the type does not list.
    """
    path = ""
    if message.endswith("`") and " - at `$" in message:
        message, _, path = message.rpartition(" - at `$")
        path = path.removesuffix("`")
    if message.startswith(_EXPLAINED):
        message, path = message.removeprefix(_EXPLAINED), path.removeprefix(".")
        inside = re.match(r"[\w.\[\]]+: ", message)
        return path + ("." if path and inside else ": " if path else "") + message
    advice = _advice(message, path, table, settings, more)
    message = message.replace("\n", "\\n").replace("\r", "\\r")
    message = message.replace("Object contains unknown field", "unknown key")
    message = message.replace("Object missing required field", "missing key").replace(" | null`", "`")
    message = re.sub("^Invalid (?:enum )?value ('.*')$", r"\1 is not known", message, flags=re.DOTALL)
    message = message[:1].lower() + message[1:] + advice
    path = path.removeprefix(".")
    return f"{path}: {message}" if path else message


def _advice(message: str, path: str, table: object, settings: type, more: Iterable[str]) -> str:
    """Return a suggestion for an unknown key or value, or a missing kind."""
    key = _UNKNOWN_KEY.fullmatch(message)
    if message == _MISSING_KIND:
        path += ".kind"
    elif key is None and not message.startswith(("Invalid value", "Invalid enum value")):
        return ""
    try:
        value, known, elsewhere = _known_at(path, table, settings)
    except (LookupError, TypeError, StopIteration):
        return ""  # the key contains text that looks like a path
    word = value if key is None else key[1]
    if not isinstance(word, str) or not known:
        return ""
    if word in elsewhere:
        return f"; {elsewhere[word]}"
    if (
        key is not None
        and not find_near(word, known)
        and (tables := [path for path in find_tables(word, settings) if path])
    ):
        return f"; it is a key of {' or '.join([f'[{path}]' for path in tables[:SUGGESTIONS_MAX]])}"
    if path.endswith("kind"):
        known = [*known, *more]
    return "; " + (suggest(word, known) or f"choose from {', '.join(known)}")


def _known_at(path: str, table: Any, settings: type) -> tuple[object, list[str], Mapping[str, str]]:
    """Return the value at a path, what is valid there (keys, kinds or words), and hints for keys."""
    here = _parts(types.type_info(settings))
    for name, index in _STEP.findall(path):
        tables = [part for part in here if isinstance(part, types.StructType)]
        if index:
            here = [
                item for part in here if isinstance(part, types.VarTupleType) for item in _parts(part.item_type)
            ]
            table = table[int(index)]
        elif name == "kind" and tables[0].tag is not None:
            return table.get(name, ""), [str(part.tag) for part in tables], {}
        else:
            here, table = _parts(_fields(tables, table)[name].type), table[name]
    if isinstance(table, dict):
        tables = [part for part in here if isinstance(part, types.StructType)]
        return table, list(_fields(tables, table)), getattr(tables[0].cls, "ELSEWHERE", {})
    return table, [str(word) for part in here if isinstance(part, types.LiteralType) for word in part.values], {}


def _parts(described: types.Type) -> list[types.Type]:
    """Return the alternatives of a union type, or the type itself."""
    if isinstance(described := kinds_of(described), types.Metadata):
        return _parts(described.type)
    if isinstance(described, types.UnionType):
        return [part for each in described.types for part in _parts(each)]
    return [described]


def _fields(tables: list[types.StructType], table: Any) -> dict[str, types.Field]:
    """Return the fields of a table by key. If there are several kinds of table, its `kind` selects one."""
    chosen = tables[0] if len(tables) == 1 else next(each for each in tables if each.tag == table["kind"])
    return {field.encode_name: field for field in chosen.fields}
