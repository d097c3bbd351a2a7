"""Limits on what a hub may request of a device.

A hub may be faulty or another implementation of the protocol, and an unauthenticated peer may not
be a hub at all. An invalid `Welcome` is refused. Excessive times and numbers of steps are clamped.
The device then continues to work, but sends requests, pings or updates more often than the hub
specified.
"""

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import Welcome

SETTINGS_DEPTH_MAX = 16
"""Maximum nesting depth of the hub's settings."""

SETTINGS_ITEMS_MAX = 4096
"""Maximum number of values in the hub's settings."""

SEQ_MAX = 2**52
"""Maximum number of the last push, so that enough numbers remain for later pushes."""

HEADER_BYTES_MAX = 1 << 14
"""Maximum header length of all messages except `Welcome`, which contains the names of all
parameters.
"""

HEARTBEAT_S_MIN = 0.05
LEASE_S_MAX = 3600.0
"""Maximum lease in seconds. After this time without a message, a device considers its hub lost,
even if the hub set a longer lease.
"""

RETRY_AFTER_S_MAX = 3600.0
LOCAL_STEPS_MAX = 1_000_000
"""Maximum number of local steps between two exchanges, unless the device has a lower limit of its
own.
"""


def check_welcome(welcome: Welcome) -> None:
    """Raise `ProtocolError` for a `Welcome` that a correct hub never sends."""
    if welcome.seq_last > SEQ_MAX:
        raise ProtocolError(f"Welcome: seq_last is {welcome.seq_last}, which must be at most {SEQ_MAX}")
    if welcome.base is not None and welcome.graph is None:
        raise ProtocolError("Welcome: names a base, but no graph that uses it")
    waiting: list[tuple[object, int]] = [(welcome.settings, 1)]
    items = 0
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list | tuple):
            continue
        items += len(value)
        if depth > SETTINGS_DEPTH_MAX or items > SETTINGS_ITEMS_MAX:
            raise ProtocolError(
                f"Welcome: the hub's settings have more than {SETTINGS_DEPTH_MAX} levels or "
                f"{SETTINGS_ITEMS_MAX} values"
            )
        waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]


def clamp_times(welcome: Welcome) -> Welcome:
    """Limit the lease and the heartbeat of a welcome.

    The heartbeat must be shorter than the lease.
    """
    lease_s = min(max(welcome.lease_s, 4 * HEARTBEAT_S_MIN), LEASE_S_MAX)
    heartbeat_s = max(welcome.heartbeat_s, HEARTBEAT_S_MIN)
    if heartbeat_s >= lease_s:
        heartbeat_s = lease_s / 2
    if (heartbeat_s, lease_s) == (welcome.heartbeat_s, welcome.lease_s):
        return welcome
    return msgspec.structs.replace(welcome, heartbeat_s=heartbeat_s, lease_s=lease_s)


def clamp_retry(retry_after_s: float | None) -> float | None:
    """Limit the time to wait before a retry."""
    return None if retry_after_s is None else min(retry_after_s, RETRY_AFTER_S_MAX)
