"""The peers file (TOML) lists the devices that average their models. All use the same list.

    peer = [
        {name = "pi-1", address = "tcp://192.168.1.11:5600", key = "2d9f..."},
        {name = "pi-2", address = "tcp://192.168.1.12:5600", key = "81c4..."},
    ]

Only these devices may connect. A device listens on the address of its own entry. To revoke the key
of a device, remove its entry.
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
    """An entry of `peer`: a peer's name, the address at which others reach it, and its public key."""

    name: DeviceId
    address: str
    key: str

    def __post_init__(self) -> None:
        try:
            read_key(self.key)
        except ValueError as error:
            raise ValueError(
                f"peer {self.name}: {error}; remove the entry and start that peer, which then prints its entry"
            ) from None

    @property
    def public(self) -> Key:
        """The key as bytes."""
        return read_key(self.key)

    def text(self) -> str:
        """Return the entry in the syntax of the file."""
        return f'{{name = "{self.name}", address = "{self.address}", key = "{self.key}"}}'


class Peers(Section, frozen=True):
    """The list of peers. Names, keys and addresses are unique."""

    peer: Annotated[tuple[PeerEntry, ...], Meta(max_length=PEERS_MAX)] = ()

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [entry.name for entry in self.peer]),
            ("key", [entry.public.hex() for entry in self.peer]),
            ("address", [entry.address for entry in self.peer]),
        ):
            if twice := _first_repeated(values):
                raise ValueError(f"duplicate {what} {twice}; each peer needs its own {what}")

    def of(self, name: str) -> PeerEntry | None:
        """Return the entry with this name, or `None`."""
        return next((entry for entry in self.peer if entry.name == name), None)

    def with_found(self, found: Sequence[PeerEntry]) -> "Peers":
        """Return the list with the peers in `found` added.

        They replace existing entries that have the same name, address or key. Raises `ValueError`
        if `found` contains duplicates, or if the result has too many peers.
        """
        taken = {value for each in found for value in (each.name, each.address, each.public)}
        kept = [each for each in self.peer if taken.isdisjoint((each.name, each.address, each.public))]
        if len(kept) + len(found) > PEERS_MAX:
            raise ValueError(
                f"more than {PEERS_MAX} peers, including those found earlier; remove peers that no longer exist "
                "from the peers file"
            )
        return Peers(tuple(sorted([*kept, *found], key=lambda each: each.name)))


def write_peers(path: Path, peers: Peers) -> None:
    """Write the file; raises `StorageError`."""
    entries = "".join([f"    {entry.text()},\n" for entry in peers.peer])
    replace_file(path, f"peer = [\n{entries}]\n".encode())


def read_peers(path: Path) -> Peers:
    """Read the file; raises `ConfigError`.

    A relative path in an `ipc://` address is relative to the folder of the file.
    """
    peers, folder = read_toml(path, Peers), path.parent
    return Peers(tuple([replace(entry, address=whole_address(entry.address, folder)) for entry in peers.peer]))


def read_first_peers(path: Path, name: str, key: Key) -> Peers:
    """Read the file when a device starts.

    If the file is missing, raise `ConfigError` with a message that contains the entry to write.
    """
    try:
        path.stat()
    except FileNotFoundError:
        entry = _wanted(name, key).text()
        raise ConfigError(
            f"{path}: no such file; create it with the same content on every device: peer = [{entry}]"
        ) from None
    except OSError:
        pass  # reading the file raises the error
    return read_peers(path)


def own_entry(path: Path, peers: Peers, name: str, key: Key) -> PeerEntry:
    """Return the entry of this device.

    If it is missing, raise `ConfigError` with a message that contains the entry to write.
    """
    entry = peers.of(name)
    if entry is None:
        wanted = _wanted(name, key)
        raise ConfigError(f"{path}: peer {name} is missing; add it to the list on every device: {wanted.text()}")
    if entry.public != key:
        raise ConfigError(
            f'{path}: the key of {name} differs from this device\'s key; set key = "{key.hex()}" on every device'
        )
    return entry


def _wanted(name: str, key: Key) -> PeerEntry:
    return PeerEntry(name, "tcp://THIS_DEVICE:5600", key.hex())


def _first_repeated(values: Sequence[str]) -> str | None:
    return next((value for number, value in enumerate(values) if value in values[:number]), None)
