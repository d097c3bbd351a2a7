"""A new version beside the old one: switched over, and switched back if the service does not come up."""

from collections.abc import Callable, Sequence
from pathlib import Path

from edgeasync.errors import ConfigError, HubUnreachableError
from edgeasync.host.notify import HUBLESS, JOINED
from edgeasync.ops.service.environments import Environments
from edgeasync.ops.service.systemd import Systemd, wait_until
from edgeasync.ops.service.unit import Unit

Wait = Callable[[Callable[[], bool], float], bool]

_UP = {"agent": f"{JOINED} ", "hub": "", "peer": f"{HUBLESS} "}
"""How the status of a service begins that is up."""


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
    """Let the service run from the environment that `make` returns; return the old one, which is kept.

    Once the service is up, those of the other units that run are started again, from the new environment.

    Raises `HubUnreachableError` if the service is not up within `limit_s` (an agent: has not joined its hub). By
    then the old one runs again, and the new one is gone. So it is when somebody interrupts. Raises `ConfigError`
    if there is no such service.
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
    for other in others:  # before the environment from which it runs is dropped, now or by the next upgrade
        if manager.status(other).get("ActiveState") in ("active", "activating"):
            manager.start(other)
    environments.drop_others(new, old)
    return old


def _await_up(unit: Unit, manager: Systemd, before: str, limit_s: float, wait: Wait) -> None:
    """Raise `HubUnreachableError` unless a start after the one `before` comes up."""

    def is_up() -> bool:
        status = manager.status(unit.file)
        joined = status.get("StatusText", "").startswith(_UP[unit.kind])
        return status.get("ActiveState") == "active" and status.get("InvocationID") != before and joined

    if not wait(is_up, limit_s):
        said = manager.status(unit.file).get("StatusText") or "it says nothing"
        wanted = {"agent": "join its hub", "hub": "listen", "peer": "begin"}[unit.kind]
        raise HubUnreachableError(
            f"the new {unit.kind} did not {wanted} within {limit_s:g} s ({said}); the old one runs again: read "
            f"'edgeasync service logs {unit.kind}'"
        )
