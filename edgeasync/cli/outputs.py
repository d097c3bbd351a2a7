"""The objects that commands print with `--json`, unless a lower layer defines them."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgeasync.protocol.status import EvaluationStatus


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """An event. [Events and exit codes](../operate/events.md) lists the names."""

    event: str
    """the event's name"""
    time: float
    """seconds since 1970, wall clock"""
    device: str | UnsetType = UNSET
    """the device; empty if the event concerns the whole hub"""
    detail: str = ""
    """human-readable sentence, which may change"""
    figures: dict[str, float | None] | UnsetType = UNSET
    """only of an `alarm` of a hub: like those of an alarm's cause in the
    [status](#edgeasync-status), if there are any. For an alarm about a device, `updates` is the
    number of consecutive updates with this finding
    """


class HubProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a hub, every ten seconds if they changed: the event `progress`."""

    version: int
    """number of the newest version"""
    updates_applied: int
    """updates that are part of the model"""
    devices_live: int
    """devices with a valid lease"""
    updates_buffered: int | UnsetType = UNSET
    """updates that wait for the next version, unless there are none"""
    updates_rejected: int | UnsetType = UNSET
    """updates that never count, unless there are none"""
    alarms: int | UnsetType = UNSET
    """active alarms, unless there are none"""
    loss: float | UnsetType = UNSET
    """median of the devices' last losses, if known"""
    accuracy: float | UnsetType = UNSET
    """accuracy of the last evaluation, if known"""


class HubTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a hub: the event `stopped`."""

    reason: str
    """why the hub ended"""
    version: int
    """number of the newest version"""
    updates_applied: int
    """updates that are part of the model"""
    updates_rejected: int
    """updates that never count"""
    duplicates: int
    """repeated pushes"""
    model: str
    """file of the newest version"""
    best: EvaluationStatus | UnsetType = UNSET
    """best evaluation, if there is one"""
    best_model: str | UnsetType = UNSET
    """file of that version"""


class AgentProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an agent: the events `progress`, every ten seconds, and `stopped`, the last line."""

    reason: str | UnsetType = UNSET
    """only of `stopped`: why the agent ended"""
    steps: int
    """local steps"""
    updates_answered: int
    """updates that the hub answered"""
    day_left_bytes: int | None
    """what remains today of the agent's own `bytes_per_day_max`; null without that setting"""
    round_trip_s: float | UnsetType | None = UNSET
    """only of `progress`: round trip of the last ping; null before the first"""


class PeerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a peer: the events `progress`, every ten seconds, and `stopped`, the last line."""

    reason: str | UnsetType = UNSET
    """only of `stopped`: why the peer ended"""
    steps: int
    """local steps"""
    rounds: int
    """rounds that it took part in"""
    loss: float | None
    """mean loss of the last local steps; null before the first"""
    bytes_up: int
    """bytes sent to peers"""
    bytes_down: int
    """bytes received from peers"""


class HubCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum memory of a hub."""

    event: Literal["checked"] = "checked"
    parts: dict[str, int]
    """bytes by name"""
    bytes: int
    """their sum"""
    machine_bytes: int
    """memory of this machine; 0 if unknown"""
    connections: int
    """`limits.devices_max`"""
    connections_that_fit: int
    """connections that the open-file limit allows"""


class BuiltGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A training graph."""

    graph: str
    """file of the training graph"""
    values: str
    """file of the initial values"""
    parameters: int
    """number of trained values"""
    statistics: int
    """number of values that are running statistics"""
    bytes: int
    """size of the graph"""
    warnings: list[str]
    """what may be wrong with the file"""
    notes: list[str]
    """what the build chose or changed"""


class CheckedGradient(msgspec.Struct, frozen=True, kw_only=True):
    """The check of one parameter along one direction."""

    name: str
    """the parameter"""
    slope: float
    """derivative of the loss along the direction, from the gradient"""
    difference: float
    """the same derivative by finite differences"""
    error: float
    """relative difference of the two"""
    passed: bool
    """whether they agree"""
    compared: bool
    """false if both are 0, so that the check proves nothing"""


class CheckedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The check of a model's gradients."""

    passed: bool
    """whether all gradients passed"""
    gradients: list[CheckedGradient]
    """one result per parameter"""
    warnings: list[str]
    """what may be wrong with the file"""
    notes: list[str]
    """what the build chose or changed"""


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A trained model."""

    model: str
    """the file"""
    arrays: int
    """number of trained arrays"""
    version: int
    """number of the version"""
    lineage: str
    """lineage of the version"""
    time: float
    """when the version was made, in seconds since 1970"""
    evaluation: EvaluationStatus | None
    """the last evaluation before that time"""
    remarks: list[str]
    """human-readable warnings"""


class DemoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of the demo."""

    updates_applied: int
    """updates that are part of the model"""
    examples_per_s: float
    """moving average"""


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the demo, printed after its events."""

    accuracy: float
    """accuracy on digits that no agent had"""
    devices_total: int
    """number of agents"""
    dropped: int
    """agents that were lost"""
    rejoined: int
    """agents that came back"""
    updates_applied: int
    """updates that are part of the model"""
    updates_rejected: int
    """updates that never count"""
    duplicates: int
    """repeated pushes"""
    seconds: float
    """duration of the demo"""
    model: str
    """the trained ONNX file"""
    devices: dict[str, DemoDevice]
    """the agents by name"""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Wheels for a board."""

    folder: str
    """the folder"""
    files: list[str]
    """names of the files in it"""
    bytes: int
    """their size"""


class KeyLine(msgspec.Struct, frozen=True, kw_only=True):
    """A key, a token, or the result of a command. Keys that do not apply are omitted."""

    name: str | UnsetType = UNSET
    """name of the device or operator"""
    role: Literal["device", "operator", "revoked", "refused", "token"] | UnsetType = UNSET
    """what the key may do, or what was done"""
    fingerprint: str | UnsetType = UNSET
    """fingerprint of the key"""
    address: str | UnsetType = UNSET
    """`pending`: where the key connected from"""
    seen: float | UnsetType = UNSET
    """`pending`: when it last connected, in seconds since 1970"""
    key: str | UnsetType = UNSET
    """the public key"""
    token: str | UnsetType = UNSET
    """`enrol`: the token"""
    expires_s: float | UnsetType = UNSET
    """seconds until the token expires"""
    keys: str | UnsetType = UNSET
    """`init` and `enrol --role operator`: folder of the keys"""
    hub_key: str | UnsetType = UNSET
    """`init`: the hub's public key"""
    operator: str | UnsetType = UNSET
    """`init`: name of the operator"""
    cleared: int | UnsetType = UNSET
    """`pending --clear`: number of deleted keys"""


class ServiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """A service, or the result of a command. Keys that do not apply are omitted."""

    unit: str
    """name of the systemd unit"""
    changed: list[str] | UnsetType = UNSET
    """`install`: files that were written"""
    removed: list[str] | UnsetType = UNSET
    """`remove`: files that were deleted"""
    state: str | UnsetType = UNSET
    """`status`: state in systemd"""
    status: str | UnsetType = UNSET
    """`status`: the service's own sentence"""
    restarts: int | UnsetType = UNSET
    """`status`: number of restarts"""
    pid: int | UnsetType = UNSET
    """`status`: the process, or 0"""
    environment: str | UnsetType = UNSET
    """`upgrade`: the new environment"""
    kept: str | UnsetType = UNSET
    """`upgrade`: the old environment"""


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The effective value of a setting."""

    table: str
    """the table"""
    key: str
    """the key"""
    value: Any
    """its value"""
    default: Any
    """its default"""
    source: str
    """where the value comes from: `file`, `default`, `from [hub]`, or this board's profile"""
    changed: bool
    """whether the value differs from the default"""
