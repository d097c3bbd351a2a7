"""Upgrades a service to a new version, and rolls back if the service does not start."""

from collections.abc import Callable, Sequence
from pathlib import Path

from edgeasync.errors import ConfigError, HubUnreachableError
from edgeasync.host.notify import HUBLESS, JOINED
from edgeasync.ops.service.environments import Environments
from edgeasync.ops.service.systemd import Systemd, wait_until
from edgeasync.ops.service.unit import Unit

Wait = Callable[[Callable[[], bool], float], bool]

_UP = {"agent": f"{JOINED} ", "hub": "", "peer": f"{HUBLESS} "}
"""Prefix of the status line of a running service."""


def upgrade(
    environments: Environments,
    make: Callable[[], Path],
    unit: Unit,
    manager: Systemd,
    *,
    others: Sequence[str] = (),
    limit_s: float,
    wait: Wait = wait_until,
) -> Path:
    """Run the service from the environment that `make` returns. Return the old environment.

    Then restart those units in `others` that are running. The old environment is not deleted.

    Raises `HubUnreachableError` if the service is not up within `limit_s` seconds; an agent is up
    when it has joined its hub. After this error or an interrupt, the service runs from the old
    environment again, and the new one is deleted. Raises `ConfigError` if the service does not
    exist.
    """
    old, status = environments.current, manager.status(unit.file)
    if status.get("LoadState") == "not-found":
        raise ConfigError(
            f"{unit.file}: no such service; install it: edgeasync service install {unit.kind} FILE.toml"
        )
    new = make()
    try:
        environments.switch(new)
        manager.start(unit.file)
        _await_up(unit, manager, status.get("InvocationID", ""), limit_s, wait)
    except BaseException:
        environments.switch(old)
        try:
            manager.start(unit.file)
        finally:
            environments.drop(new)
        raise
    for other in others:  # restart them before this or the next upgrade deletes their environment
        if manager.status(other).get("ActiveState") in ("active", "activating"):
            manager.start(other)
    environments.drop_others(new, old)
    return old


def _await_up(unit: Unit, manager: Systemd, before: str, limit_s: float, wait: Wait) -> None:
    """Wait until the unit is up with another id than `before`. Raises `HubUnreachableError` on timeout."""

    def is_up() -> bool:
        status = manager.status(unit.file)
        joined = status.get("StatusText", "").startswith(_UP[unit.kind])
        return status.get("ActiveState") == "active" and status.get("InvocationID") != before and joined

    if not wait(is_up, limit_s):
        said = manager.status(unit.file).get("StatusText") or "no status"
        wanted = {"agent": "join its hub", "hub": "listen", "peer": "start training"}[unit.kind]
        raise HubUnreachableError(
            f"the new {unit.kind} did not {wanted} within {limit_s:g} s ({said}); the old one is running again; "
            f"read 'edgeasync service logs {unit.kind}'"
        )
