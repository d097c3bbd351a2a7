"""Statuses of a hub, made of what a test cares about."""

import msgspec

from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import ModelVersion
from edgeasync.protocol.status import ActiveAlarm, DeviceStatus, HubStatus, read_status

DAEMON = {
    "address": "tcp://127.0.0.1:5555", "pid": 42, "uptime_s": 90.0, "model_file": "/run/model.safetensors",
    "parameters": 3, "durability": "journal", "version_durable": None, "disk_trouble": "", "denied": {},
    "enrolled_unseen": [], "journal": None,
}  # fmt: skip
"""What the daemon adds to the status of its core."""

DEVICE = DeviceStatus(
    id="pi", state="training", quarantine=None, staleness=1, local_steps=8, last_seen_s=0.5, examples_per_s=100.0,
    pushes_answered=10, updates_applied=10, updates_buffered=0, duplicates=0, updates_rejected={},
    updates_shortened=0, weight_kept=1.0, loss=0.25, pace_percent=100, pace_reason="", temperature_c=50.0,
    assigned_steps=8, why="period 1 s", bound="", step_s=0.1, talk_s=0.2, talk_share=0.2, period_s=1.0,
    push_codec="int8", bytes_up=1000, bytes_down=2000, round_trip_s=0.01, bandwidth_bytes_per_s=1_000_000,
    day_bytes=3000, bytes_per_day_max=None, day_left_bytes=None, rest_s=0.0, stalled_s=0.5, machine="aarch64",
    software="edgeasync 0.1.0", address="10.0.0.7", joined_s=3600.0, clock_offset_s=0.01, why_left="",
    last_error="", last_error_s=None,
)  # fmt: skip
"""A device that trains without trouble."""


def device(name, **changes):
    """Return the status of a healthy device with some changes."""
    return msgspec.structs.replace(DEVICE, id=name, **changes)


def alarm(name, cause="loss 8, the fleet's 0.05", remedy="alert", since_s=90.0):
    """Return an alarm about a device; "" is the fleet."""
    return ActiveAlarm(name, cause, remedy, since_s, causes=[])


def empty_core(policy=None):
    """Return the core of a hub that nobody has spoken to."""
    return HubCore(
        spec=ParameterSpec((Parameter("weights", (3,)),)), training={}, policy=policy or Policy(),
        settings=HubCoreSettings(), version=ModelVersion("00c0ffee00c0ffee", 0), make_session=lambda: bytes(16),
        now_s=0.0,
    )  # fmt: skip


def plain(core, now_s=0.0):
    """Return the whole status of a core as a hub sends it, decoded."""
    return core.status(now_s) | DAEMON


def status(devices=(), **changes) -> HubStatus:
    """Return the status of a hub with these devices and some changes."""
    return msgspec.structs.replace(read_status(plain(empty_core())), devices=list(devices), **changes)
