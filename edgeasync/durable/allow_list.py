"""The allow-list: a text file of the keys that may connect to a hub. Users may edit it.

    # comments and empty lines are preserved
    pi-1    device    2d9f...   # so is a comment after a key

Each name has one key, and each key has one name. To revoke a key, remove its line or change its
role to `revoked`. A revocation takes effect even if another line is invalid. New entries take
effect only when all lines are valid.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from edgeasync.durable.secret_files import read_secret
from edgeasync.errors import ConfigError, StorageError

Key = bytes
"""A public key: 32 bytes."""

Role = Literal["device", "operator", "revoked"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
"""Pattern of a device id without its suffix `/number`."""

_TOLD_MAX = 8
"""Maximum number of invalid lines that an error message lists."""


def check_name(name: str) -> str:
    """Return the name of a key; raises `ConfigError` if it is invalid."""
    if not NAME.match(name):
        raise ConfigError(
            f"invalid name {name!r}: start with a letter or digit, then use up to 63 letters, digits, '.', '_' or "
            "'-'; the key of NAME is also valid for NAME/0, NAME/1 and so on"
        )
    return name


_FIELD = 2**255 - 19

_LOW_ORDER = frozenset(
    (
        0,
        1,
        _FIELD - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
)
"""Coordinates of the points of order 1, 2, 4 and 8 on Curve25519 and its twist."""


class Allowed(msgspec.Struct, frozen=True):
    """An entry of the list: a name, its role and its key."""

    name: str
    role: Role
    key: Key


class AllowList:
    """The text of the list and its entries. It is immutable; edits return a new list.

    `unreadable` maps the number of each invalid line to an error message. Invalid lines have no
    entry.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries: dict[str, Allowed] = {}
        self.unreadable: dict[int, str] = {}
        self._lines: dict[str, int] = {}
        self._unclear: dict[int, str] = {}
        """The first word of each invalid line."""
        self._names: dict[Key, str] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                self._add(number, words)
            except ValueError as error:
                self.unreadable[number], self._unclear[number] = str(error), words[0]

    def _add(self, number: int, words: list[str]) -> None:
        """Parse a line and add its entry; raises `ValueError`."""
        entry = _read_words(words)
        if entry.name in self.entries:
            raise ValueError(f"the name {entry.name} is already used in line {self._lines[entry.name]}")
        if entry.key in self._names:
            raise ValueError(f"the key already belongs to {self._names[entry.key]}")
        self.entries[entry.name] = entry
        self._lines[entry.name] = number
        self._names[entry.key] = entry.name

    @classmethod
    def read(cls, path: Path) -> "AllowList":
        """Read the file; raises `StorageError` if it is missing or not a text file.

        Invalid lines do not raise an error.
        """
        content = read_secret(path, public=True)
        if b"\0" in content:
            raise StorageError(
                f"{path}: damaged, line {content[: content.index(0)].count(10) + 1} is not text; restore a backup"
            )
        return cls(content.decode(errors="surrogateescape"))

    @property
    def trouble(self) -> str:
        """The line number and error message of each invalid line."""
        return "; ".join([f"line {number}: {why}" for number, why in self.unreadable.items()][:_TOLD_MAX])

    def lets_in(self, before: Mapping[str, Allowed]) -> dict[str, Allowed]:
        """Return the entries to admit, by name. `before` contains the entries admitted until now.

        If any line is invalid, no new entries are admitted. An entry of `before` then stays
        admitted only if the list still contains it unchanged, or if an invalid line starts with its
        name.
        """
        entries = {name: entry for name, entry in self.entries.items() if entry.role != "revoked"}
        if not self.unreadable:
            return entries
        revoked = [entry for entry in self.entries.values() if entry.role == "revoked"]
        names, keys = {entry.name for entry in revoked}, {entry.key for entry in revoked}
        unclear = set(self._unclear.values())
        return {
            name: entry
            for name, entry in before.items()
            if (entries.get(name) == entry or name in unclear) and name not in names and entry.key not in keys
        }

    def by_key(self) -> dict[Key, Allowed]:
        """Return the entries by key, including revoked ones."""
        return {entry.key: entry for entry in self.entries.values()}

    def with_entry(self, entry: Allowed) -> "AllowList":
        """Return the list with `entry` added. It replaces an entry with the same name.

        Raises `StorageError` if the list contains the key under another name.
        """
        owner = self.by_key().get(entry.key)
        if owner is not None and owner.name != entry.name:
            raise StorageError(
                f"this key already belongs to {owner.name}; revoke that name first, or use another key"
            )
        lines = self.text.removesuffix("\n").split("\n") if self.text else []
        if (number := self._lines.get(entry.name)) is None:
            lines.append(_write_line(entry))
        else:
            _, hash_sign, comment = lines[number - 1].partition("#")
            lines[number - 1] = _write_line(entry) + (f"   {hash_sign}{comment}" if hash_sign else "")
        return AllowList("".join(f"{line}\n" for line in lines))

    def revoking(self, name: str) -> "AllowList":
        """Return the list with the key of `name` revoked.

        Invalid lines that start with `name` become comments. Raises `StorageError` if the list does
        not contain the name.
        """
        unclear = [number for number, word in self._unclear.items() if word == name]
        lines = self.text.split("\n")
        for number in unclear:
            lines[number - 1] = f"# {lines[number - 1]}"
        listed = AllowList("\n".join(lines)) if unclear else self
        entry = self.entries.get(name)
        if entry is not None:
            return listed.with_entry(msgspec.structs.replace(entry, role="revoked"))
        if not unclear:
            trouble = f"; invalid lines: {self.trouble}" if self.trouble else ""
            raise StorageError(f"{name} is not in the allow-list; see 'edgeasync keys list'{trouble}")
        return listed


def read_key(text: str) -> Key:
    """Parse a key of 64 hexadecimal digits; raises `ValueError` if it is invalid or weak."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("a key has 64 hexadecimal digits")
    key = bytes.fromhex(text)
    if is_weak(key):
        raise ValueError("this key is weak (a point of low order); create another one")
    return key


def is_weak(key: Key) -> bool:
    """Return whether a public key is a point of low order.

    Anybody can decrypt messages that are encrypted for such a key.
    """
    return (int.from_bytes(key, "little") & ((1 << 255) - 1)) % _FIELD in _LOW_ORDER


def _read_words(words: list[str]) -> Allowed:
    """Parse the words of a line into an entry; raises `ValueError`."""
    if len(words) != 3:
        raise ValueError("expected NAME ROLE KEY")
    name, role, key = words
    if not NAME.match(name):
        raise ValueError("a name consists of up to 64 letters, digits, '.', '_' or '-'")
    if role not in get_args(Role):
        raise ValueError(f"unknown role; use one of {', '.join(get_args(Role))}")
    return Allowed(name, role, read_key(key))  # type: ignore[arg-type]


def _write_line(entry: Allowed) -> str:
    return f"{entry.name:<16} {entry.role:<8} {entry.key.hex()}"
