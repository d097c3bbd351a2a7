"""Checks a device's state folder without changing it."""

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
    """Return whether a path exists and this user may see it."""
    return os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises if access is denied


def examine_state(folder: Path, device_id: str, machine: str) -> Finding:
    """Check whether an agent could use the folder. `machine` is this machine's id."""
    if not is_seen(folder):
        above = next(parent for parent in folder.parents if is_seen(parent))
        if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
            return closed(folder, f"cannot be created in {above}")
        return ok("state", f"{folder} is created at the first start")
    if not folder.is_dir():
        return closed(folder, "is not a folder")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return closed(folder, "cannot be written by this user")
    if is_locked(folder):
        cure = "nothing to do, unless you start a second agent: pass it another --state and --device-id"
        return warn("state", f"{folder}: used by a running agent", cure)
    file, remedy = folder / "identity.json", "delete it; the agent then starts with a new identity"
    try:
        identity = read_json(file, DeviceIdentity, remedy=remedy)
    except FileNotFoundError:
        return ok("state", f"{folder} is new")
    except StorageError as error:
        return fail("state", str(error).removesuffix(f"; {remedy}"), remedy)
    if identity.device_id != device_id:
        cure = (
            f"pass --device-id {identity.device_id}, or another --state; otherwise the agent starts as a new "
            "device"
        )
        return warn("state", f"{folder} belongs to {identity.device_id}, but this device is {device_id}", cure)
    if identity.machine and machine and identity.machine != machine:
        cure = (
            "nothing to do if you moved the card here; if the other machine still runs, delete this folder and "
            "enrol again"
        )
        return warn("state", f"{folder} was last used on another machine, so it may be a copy", cure)
    return ok("state", f"{folder}, {identity.incarnation} starts")


def time_sync(folder: Path) -> float | None:
    """Return the seconds that it takes to sync a small file in a folder, or `None` if writing fails."""
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
    """Return the finding that this user cannot use the folder."""
    cure = (
        f"run 'sudo chown -R $USER {folder}', or pass another --state; for a service, run the doctor as the "
        "service's user"
    )
    return fail("state", f"{folder} {why}", cure)
