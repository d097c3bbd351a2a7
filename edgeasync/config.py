"""Reading settings from TOML into frozen structs; whatever is not known is refused with its path.

A settings type is a frozen `msgspec.Struct` with `forbid_unknown_fields`. Here is only what all of them
share: the reading, sizes written as `"64 MiB"`, and errors a person can act upon.
"""

import re
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edgeasync.errors import ConfigError

Settings = TypeVar("Settings")

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table in a settings file: frozen, and unknown keys are refused."""


class ByteCount(int):
    """A number of bytes; in TOML an integer or a string such as `"64 MiB"` or `"500 kB"`."""

    @classmethod
    def parse(cls, value: object) -> "ByteCount":
        """Read a size; raises `ValueError` with the accepted units."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?i?B)\s*", value)):
            number, unit = match.groups()
            if unit in _UNITS and len(number) < 20:
                return cls(Fraction(number) * _UNITS[unit])
        raise ValueError(f"{value!r} is not a size; write bytes or one of {', '.join(_UNITS)} as in '64 MiB'")


def read_toml(path: Path, settings: type[Settings]) -> Settings:
    """Read a TOML file into `settings`; raises `ConfigError` naming the file, the key and the mend."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML settings file") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give the path of a TOML settings file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return convert(table, settings, where=str(path))


def convert(table: object, settings: type[Settings], *, where: str) -> Settings:
    """Check plain tables and values into `settings`; raises `ConfigError` beginning with `where`."""
    try:
        return msgspec.convert(table, settings, dec_hook=_decode, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}") from error


def to_table(settings: object) -> Any:
    """Turn settings back into plain tables and values, as they would stand in TOML."""
    return msgspec.to_builtins(settings, enc_hook=int)


def _decode(wanted: type, value: object) -> object:
    if wanted is ByteCount:
        return ByteCount.parse(value)
    raise NotImplementedError(f"no reader for {wanted}")


def _explain(message: str) -> str:
    """Turn msgspec's ``... - at `$.hub.stop` `` into ``hub.stop: ...``, on one line whatever a key may hold."""
    message = message.replace("\n", "\\n").replace("\r", "\\r")
    if message.endswith("`") and " - at `$" in message:
        message, _, path = message.rpartition(" - at `$")
        path = path.removesuffix("`").removeprefix(".")
    else:
        path = ""
    message = message.replace("Object contains unknown field", "unknown key")
    message = message.replace("Object missing required field", "missing key")
    message = message[:1].lower() + message[1:]
    return f"{path}: {message}" if path else message
