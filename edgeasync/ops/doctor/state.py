"""Looks at a device's state folder, and changes nothing in it."""

import os
import tempfile
import time
from pathlib import Path

from edgeasync.durable.files import is_locked
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.json_file import read_json
from edgeasync.errors import StorageError
from edgeasync.ops.doctor.finding import Finding, fail, ok, warn

SYNCED_BYTES = 4096


def is_seen(path: Path) -> bool:
    """Return whether a path exists, as far as this user may look."""
    return os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises where this user may not look


def examine_state(folder: Path, device_id: str, machine: str) -> Finding:
    """Return whether an agent could use the folder; `machine` is this machine's mark."""
    if not is_seen(folder):
        above = next(parent for parent in folder.parents if is_seen(parent))
        if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
            return closed(folder, f"cannot be made in {above}")
        return ok("state", f"{folder} is made at the first start")
    if not folder.is_dir():
        return closed(folder, "is no folder")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return closed(folder, "cannot be written by this user")
    if is_locked(folder):
        cure = "nothing, if it should; for a second agent give another --state and --device-id"
        return warn("state", f"{folder}: an agent runs with it", cure)
    file, remedy = folder / "identity.json", "delete it: the agent begins with a new identity"
    try:
        identity = read_json(file, DeviceIdentity, remedy=remedy)
    except FileNotFoundError:
        return ok("state", f"{folder} is new")
    except StorageError as error:
        return fail("state", str(error).removesuffix(f"; {remedy}"), remedy)
    if identity.device_id != device_id:
        cure = (
            f"give --device-id {identity.device_id}, or another --state; else this is a new device under its name"
        )
        return warn("state", f"{folder} is of {identity.device_id}, this device is {device_id}", cure)
    if identity.machine and machine and identity.machine != machine:
        cure = "nothing, if its card was moved here; if that machine runs too, delete this folder and enrol again"
        return warn("state", f"{folder} was last used on another machine: a copy?", cure)
    return ok("state", f"{folder}, {identity.incarnation} starts")


def time_sync(folder: Path) -> float | None:
    """Return how long a small file takes to be safe on the disk of a folder; `None` if that cannot be tried."""
    existing = next(path for path in (folder, *folder.parents) if is_seen(path) and path.is_dir())
    begun_s = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-") as file:
            file.write(bytes(SYNCED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    return time.perf_counter() - begun_s


def closed(folder: Path, why: str) -> Finding:
    """Return that this user may not use the folder."""
    cure = f"'sudo chown -R $USER {folder}', or give another --state; under systemd run the doctor as its user"
    return fail("state", f"{folder} {why}", cure)
