"""A device's identity, in a folder of its own that one agent uses."""

import re
import secrets
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.durable.files import FolderLock, replace_file
from edgeasync.durable.json_file import read_json
from edgeasync.protocol.messages import COUNT_MAX


class DeviceIdentity(msgspec.Struct, frozen=True):
    """A device's identity: its random state id, and the incarnation, the number of this start.

    `machine` is a mark of the machine of the last start, empty if that is not known.
    """

    device_id: str
    state_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    incarnation: Annotated[int, Meta(ge=1, lt=COUNT_MAX)] = msgspec.field(name="start")
    machine: str = ""


class DeviceFolder:
    """A device's state folder. At most one running agent holds it.

    After `open`, `remarks` lists the other users who could read the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FolderLock(path, "state (--state)")

    def open(self, device_id: str, machine: str = "") -> DeviceIdentity:
        """Lock the folder, write the identity of this start to disk, and return it.

        `machine` is a mark of this machine. Raises `StorageError` if another agent holds the folder, or if it is
        not readable.
        """
        file = self._path / "identity.json"
        self._lock.take(
            f"another agent runs as {device_id!r} here; give this one a name and a state folder of its own "
            "(--device-id and --state, name= and state= in Python)"
        )
        try:
            identity = _next_incarnation(file, device_id)
            if machine:
                identity = msgspec.structs.replace(identity, machine=machine)
            replace_file(file, msgspec.json.encode(identity))
        except BaseException:
            self.close()
            raise
        return identity

    @property
    def remarks(self) -> list[str]:
        """Sentences for a person."""
        return self._lock.remarks

    def close(self) -> None:
        """Release the folder, so that another agent can open it."""
        self._lock.close()


def _next_incarnation(file: Path, device_id: str) -> DeviceIdentity:
    """Return the identity of the start after the one on disk, or a new one for another device."""
    try:
        known = read_json(file, DeviceIdentity, remedy="delete it to begin with a new identity")
    except FileNotFoundError:
        known = None
    if known is None or known.device_id != device_id:
        return DeviceIdentity(device_id, secrets.token_hex(16), 1)
    return msgspec.structs.replace(known, incarnation=known.incarnation + 1)


def default_device_id() -> str:
    """Return the host's name, cut to what a device id may hold."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("._-")
    return name or "device"
