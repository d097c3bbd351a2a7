"""The allow-list: who may talk to a hub, a text file with a line for each, which a person can edit.

    # comments, and lines without anything, stay where they are
    pi-1    device    2d9f...   # so does what stands behind a key

A name has one key and a key has one name. To take a line out, or give it the role `revoked`, shuts the key out.
"""

import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

from edgeasync.durable.secret_files import read_secret
from edgeasync.errors import StorageError

Key = bytes
"""A public key: 32 bytes."""

Role = Literal["device", "operator", "revoked"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
"""A device id without its `/number`."""


class Allowed(msgspec.Struct, frozen=True):
    """One line of the list: a name, what it may do, and its key."""

    name: str
    role: Role
    key: Key


class AllowList:
    """The list as text, and what stands in it. It never changes: edits return another.

    Raises `ValueError` for a text with lines that cannot be read, each of them named.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries: dict[str, Allowed] = {}
        self._lines: dict[str, int] = {}
        keys: dict[Key, str] = {}
        wrong = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                entry = _read_line(line)
                if entry is None:
                    continue
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
                continue
            if entry.name in self.entries:
                wrong.append(f"line {number}: the name {entry.name} stands in line {self._lines[entry.name]} too")
                continue
            if entry.key in keys:
                wrong.append(f"line {number}: the key is that of {keys[entry.key]}")
                continue
            self.entries[entry.name] = entry
            self._lines[entry.name] = number
            keys[entry.key] = entry.name
        if wrong:
            raise ValueError("; ".join(wrong[:8]))

    @classmethod
    def read(cls, path: Path) -> "AllowList":
        """Read the file; raises `StorageError`."""
        content = read_secret(path, public=True)
        try:
            return cls(content.decode())
        except ValueError as error:
            raise StorageError(
                f"{path}: cannot be read ({error}); nothing of it counts until it can be"
            ) from error

    def by_key(self) -> dict[Key, Allowed]:
        """Return the entries by their keys, the revoked ones among them."""
        return {entry.key: entry for entry in self.entries.values()}

    def with_entry(self, entry: Allowed) -> "AllowList":
        """Return the list with an entry that takes the place of the one of that name.

        Raises `StorageError` if the key is another name's.
        """
        owner = self.by_key().get(entry.key)
        if owner is not None and owner.name != entry.name:
            raise StorageError(f"this key is that of {owner.name} already")
        lines = self.text.splitlines()
        if (number := self._lines.get(entry.name)) is None:
            lines.append(_write_line(entry))
        else:
            _, hash_sign, comment = lines[number - 1].partition("#")
            lines[number - 1] = _write_line(entry) + (f"   {hash_sign}{comment}" if hash_sign else "")
        return AllowList("".join(f"{line}\n" for line in lines))

    def revoking(self, name: str) -> "AllowList":
        """Return the list with that name's key shut out; raises `StorageError` for a name that is not in it."""
        entry = self.entries.get(name)
        if entry is None:
            raise StorageError(f"{name} is not in the allow-list; look at 'edgeasync keys list'")
        return self.with_entry(msgspec.structs.replace(entry, role="revoked"))


def read_key(text: str) -> Key:
    """Return the key that 64 hexadecimal digits stand for; raises `ValueError`."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("a key has 64 hexadecimal digits")
    return bytes.fromhex(text)


def _read_line(line: str) -> Allowed | None:
    """Return what a line says, `None` for an empty one; raises `ValueError`."""
    words = line.partition("#")[0].split()
    if not words:
        return None
    if len(words) != 3:
        raise ValueError("write NAME ROLE KEY")
    name, role, key = words
    if not NAME.match(name):
        raise ValueError("a name has letters, digits, '.', '_' and '-', at most 64")
    if role not in get_args(Role):
        raise ValueError(f"a role is one of {', '.join(get_args(Role))}")
    return Allowed(name, role, read_key(key))  # type: ignore[arg-type]


def _write_line(entry: Allowed) -> str:
    return f"{entry.name:<16} {entry.role:<8} {entry.key.hex()}"
