"""The file of peers: who averages with whom, a TOML file that is the same on all of them.

    peer = [
        {name = "pi-1", address = "tcp://192.168.1.11:5600", key = "2d9f..."},
        {name = "pi-2", address = "tcp://192.168.1.12:5600", key = "81c4..."},
    ]

Nobody else comes in. A device listens at its own entry's address. To take an entry out shuts that key out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from edgeasync.config import Section, read_toml, whole_address
from edgeasync.durable.allow_list import Key, read_key
from edgeasync.durable.files import replace_file
from edgeasync.errors import ConfigError
from edgeasync.protocol.messages import PEERS_MAX, DeviceId


class PeerEntry(Section, frozen=True):
    """An entry of `peer`: one peer's name, its address for the others, and its public key."""

    name: DeviceId
    address: str
    key: str

    def __post_init__(self) -> None:
        try:
            read_key(self.key)
        except ValueError as error:
            raise ValueError(
                f"peer {self.name}: {error}; it prints its entry itself if it is not in the file"
            ) from None

    @property
    def public(self) -> Key:
        """The key's bytes."""
        return read_key(self.key)

    def text(self) -> str:
        """Return the entry as it stands in the list of a file."""
        return f'{{name = "{self.name}", address = "{self.address}", key = "{self.key}"}}'


class Peers(Section, frozen=True):
    """The file: every name and every key once."""

    peer: Annotated[tuple[PeerEntry, ...], Meta(max_length=PEERS_MAX)] = ()

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [entry.name for entry in self.peer]),
            ("key", [entry.public.hex() for entry in self.peer]),
            ("address", [entry.address for entry in self.peer]),
        ):
            if twice := _first_repeated(values):
                raise ValueError(f"{what} {twice} stands there twice; each peer has its own")

    def of(self, name: str) -> PeerEntry | None:
        """Return the entry of a name, if there is one."""
        return next((entry for entry in self.peer if entry.name == name), None)

    def with_found(self, found: Sequence[PeerEntry]) -> "Peers":
        """Return the list with what is found of peers, which counts more than what stood there.

        Raises `ValueError` for a name, key or address that is found twice, and for too many peers.
        """
        taken = {value for each in found for value in (each.name, each.address, each.public)}
        kept = [each for each in self.peer if taken.isdisjoint((each.name, each.address, each.public))]
        if len(kept) + len(found) > PEERS_MAX:
            raise ValueError(f"over {PEERS_MAX} peers with those of before; delete the list of before")
        return Peers(tuple(sorted([*kept, *found], key=lambda each: each.name)))


def write_peers(path: Path, peers: Peers) -> None:
    """Write the file; raises `StorageError`."""
    entries = "".join([f"    {entry.text()},\n" for entry in peers.peer])
    replace_file(path, f"peer = [\n{entries}]\n".encode())


def read_peers(path: Path) -> Peers:
    """Read the file; raises `ConfigError`. The path of an `ipc://` address is relative to the file's folder."""
    peers, folder = read_toml(path, Peers), path.parent
    return Peers(tuple([replace(entry, address=whole_address(entry.address, folder)) for entry in peers.peer]))


def read_first_peers(path: Path, name: str, key: Key) -> Peers:
    """Read the file at a device's start; raises `ConfigError`, with what to write if there is no file yet."""
    try:
        path.stat()
    except FileNotFoundError:
        entry = _wanted(name, key).text()
        raise ConfigError(f"{path}: no such file; make it, the same on every device: peer = [{entry}]") from None
    except OSError:
        pass  # reading it says why
    return read_peers(path)


def own_entry(path: Path, peers: Peers, name: str, key: Key) -> PeerEntry:
    """Return this device's entry; raises `ConfigError`, with the entry to write, if it is not there."""
    entry = peers.of(name)
    if entry is None:
        wanted = _wanted(name, key)
        raise ConfigError(f"{path}: has no peer {name}; add to its list, on every device: {wanted.text()}")
    if entry.public != key:
        raise ConfigError(
            f'{path}: the key of {name} is not this device\'s; write key = "{key.hex()}", on every device'
        )
    return entry


def _wanted(name: str, key: Key) -> PeerEntry:
    return PeerEntry(name, "tcp://THIS_DEVICE:5600", key.hex())


def _first_repeated(values: Sequence[str]) -> str | None:
    return next((value for number, value in enumerate(values) if value in values[:number]), None)
