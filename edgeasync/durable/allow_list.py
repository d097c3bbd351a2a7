"""The allow-list: who may talk to a hub, a text file with a line for each, which a person can edit.

    # comments, and lines without anything, stay where they are
    pi-1    device    2d9f...   # so does what stands behind a key

A name has one key and a key has one name. To take a line out, or give it the role `revoked`, shuts the key out.
That holds even while another line cannot be read. Who is new waits until every line can be.
"""

import re
from collections.abc import Mapping
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

_TOLD_MAX = 8
"""Of how many lines that cannot be read a person is told."""


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
"""The coordinates of Curve25519's points of order 1, 2, 4 and 8, and of its twist's."""


class Allowed(msgspec.Struct, frozen=True):
    """One line of the list: a name, what it may do, and its key."""

    name: str
    role: Role
    key: Key


class AllowList:
    """The list as text, and what stands in it. It never changes: edits return another.

    `unreadable` says of every line that cannot be read what is wrong with it; no entry is made of such a line.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries: dict[str, Allowed] = {}
        self.unreadable: dict[int, str] = {}
        self._lines: dict[str, int] = {}
        self._unclear: dict[int, str] = {}
        """The word that each line which cannot be read begins with."""
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
        """Add the entry of a line; raises `ValueError`."""
        entry = _read_words(words)
        if entry.name in self.entries:
            raise ValueError(f"the name {entry.name} stands in line {self._lines[entry.name]} too")
        if entry.key in self._names:
            raise ValueError(f"the key is that of {self._names[entry.key]}")
        self.entries[entry.name] = entry
        self._lines[entry.name] = number
        self._names[entry.key] = entry.name

    @classmethod
    def read(cls, path: Path) -> "AllowList":
        """Read the file, whatever its lines say; raises `StorageError` for one that is not there or damaged."""
        content = read_secret(path, public=True)
        if b"\0" in content:
            raise StorageError(f"{path}: is damaged, line {content[: content.index(0)].count(10) + 1} is no text")
        return cls(content.decode(errors="surrogateescape"))

    @property
    def trouble(self) -> str:
        """The number of every line that cannot be read, and why."""
        return "; ".join([f"line {number}: {why}" for number, why in self.unreadable.items()][:_TOLD_MAX])

    def lets_in(self, before: Mapping[str, Allowed]) -> dict[str, Allowed]:
        """Return the entries that let somebody in, by name, given those `before` this list.

        While a line cannot be read, that is whom this list still names of those before. The name that such a line
        begins with stays as it was.
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
        """Return the entries by their keys, the revoked ones among them."""
        return {entry.key: entry for entry in self.entries.values()}

    def with_entry(self, entry: Allowed) -> "AllowList":
        """Return the list with an entry that takes the place of the one of that name.

        Raises `StorageError` if the key is another name's.
        """
        owner = self.by_key().get(entry.key)
        if owner is not None and owner.name != entry.name:
            raise StorageError(f"this key is that of {owner.name} already")
        lines = self.text.removesuffix("\n").split("\n") if self.text else []
        if (number := self._lines.get(entry.name)) is None:
            lines.append(_write_line(entry))
        else:
            _, hash_sign, comment = lines[number - 1].partition("#")
            lines[number - 1] = _write_line(entry) + (f"   {hash_sign}{comment}" if hash_sign else "")
        return AllowList("".join(f"{line}\n" for line in lines))

    def revoking(self, name: str) -> "AllowList":
        """Return the list with that name's key shut out; raises `StorageError` for a name that is not in it.

        Lines of that name that cannot be read become comments.
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
            trouble = f"; these lines cannot be read: {self.trouble}" if self.trouble else ""
            raise StorageError(f"{name} is not in the allow-list; look at 'edgeasync keys list'{trouble}")
        return listed


def read_key(text: str) -> Key:
    """Return the key that 64 hexadecimal digits stand for; raises `ValueError`, also for a weak one."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("a key has 64 hexadecimal digits")
    key = bytes.fromhex(text)
    if is_weak(key):
        raise ValueError("this key protects nothing (a point of low order); make another")
    return key


def is_weak(key: Key) -> bool:
    """Return whether a public key is a point of low order: what it encrypts, anybody can decrypt."""
    return (int.from_bytes(key, "little") & ((1 << 255) - 1)) % _FIELD in _LOW_ORDER


def _read_words(words: list[str]) -> Allowed:
    """Return what a line of these words says; raises `ValueError`."""
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
