"""A device's identity, stored in its state folder."""

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
    """A device's identity: its random state id, and its incarnation, which counts its starts.

    `machine` identifies the machine on which the device started last; it is empty if unknown.
    """

    device_id: str
    state_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    incarnation: Annotated[int, Meta(ge=1, lt=COUNT_MAX)] = msgspec.field(name="start")
    machine: str = ""


class DeviceFolder:
    """A device's state folder. Only one running agent at a time may have it open.

    After `open`, `remarks` contains warnings about other users who could read the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FolderLock(path, "state (--state)")

    def open(self, device_id: str, machine: str = "") -> DeviceIdentity:
        """Lock the folder, write the identity for this start to disk, and return it.

        `machine` identifies this machine. Raises `StorageError` if another agent uses the folder,
        or if the folder cannot be read.
        """
        file = self._path / "identity.json"
        self._lock.take(
            f"another agent runs as {device_id!r} with this folder; choose another name and another state folder "
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
        """Warnings for the user."""
        return self._lock.remarks

    def close(self) -> None:
        """Unlock the folder, so that another agent can open it."""
        self._lock.close()


def _next_incarnation(file: Path, device_id: str) -> DeviceIdentity:
    """Return the identity for the next start. If the device id has changed, return a new identity."""
    try:
        known = read_json(file, DeviceIdentity, remedy="delete it to create a new identity")
    except FileNotFoundError:
        known = None
    if known is None or known.device_id != device_id:
        return DeviceIdentity(device_id, secrets.token_hex(16), 1)
    return msgspec.structs.replace(known, incarnation=known.incarnation + 1)


def default_device_id() -> str:
    """Return the host name, converted to a valid device id."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("._-")
    return name or "device"
