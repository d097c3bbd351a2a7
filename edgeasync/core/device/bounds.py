"""How much a hub may ask of a device. A hub of another make may be wrong, and who answers may be no hub.

A welcome that no sound hub says is taken for no welcome. Times and steps that are out of reason are clamped: the
device keeps working, and asks, pings or answers more often than it was told.
"""

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import Welcome

SETTINGS_DEPTH_MAX = 16
SETTINGS_ITEMS_MAX = 4096
"""How deep the tables of a hub's settings may lie inside one another, and how many values they may have."""

SEQ_MAX = 2**52
"""The highest number of a last update that leaves as many again for those to come."""

HEADER_BYTES_MAX = 1 << 14
"""Of every message but a welcome, which has the names of all parameters."""

HEARTBEAT_S_MIN = 0.05
LEASE_S_MAX = 3600.0
"""A silent hub is given up by then, whatever it said."""

RETRY_AFTER_S_MAX = 3600.0
LOCAL_STEPS_MAX = 1_000_000
"""Between two exchanges, unless the device has a lower bound of its own."""


def check_welcome(welcome: Welcome) -> None:
    """Raise `ProtocolError` for a welcome that no sound hub says."""
    if welcome.seq_last > SEQ_MAX:
        raise ProtocolError(f"Welcome: seq_last {welcome.seq_last} leaves no number for an update")
    waiting: list[tuple[object, int]] = [(welcome.settings, 1)]
    items = 0
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list | tuple):
            continue
        items += len(value)
        if depth > SETTINGS_DEPTH_MAX or items > SETTINGS_ITEMS_MAX:
            raise ProtocolError(
                f"Welcome: the hub's settings lie more than {SETTINGS_DEPTH_MAX} deep inside one another, "
                f"or are more than {SETTINGS_ITEMS_MAX}"
            )
        waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]


def clamp_times(welcome: Welcome) -> Welcome:
    """Return the welcome with a lease and a heartbeat within reason, and the heartbeat shorter than the lease."""
    lease_s = min(max(welcome.lease_s, 4 * HEARTBEAT_S_MIN), LEASE_S_MAX)
    heartbeat_s = max(welcome.heartbeat_s, HEARTBEAT_S_MIN)
    if heartbeat_s >= lease_s:
        heartbeat_s = lease_s / 2
    if (heartbeat_s, lease_s) == (welcome.heartbeat_s, welcome.lease_s):
        return welcome
    return msgspec.structs.replace(welcome, heartbeat_s=heartbeat_s, lease_s=lease_s)


def clamp_retry(retry_after_s: float | None) -> float | None:
    """Return when to try again, within reason."""
    return None if retry_after_s is None else min(retry_after_s, RETRY_AFTER_S_MAX)
