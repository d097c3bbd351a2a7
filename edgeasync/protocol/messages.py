"""The messages of the protocol, as structs whose fields have types and bounds.

`docs/reference/wire` specifies them. The fields of a struct are sent in the order in which it
declares them. New fields may only be added at the end, with a default.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeasync.parameters import ParameterSpec
from edgeasync.structs import resolve_type

PROTOCOL_VERSION = 1
"""The protocol version in every header. Hubs and devices refuse peers with another version."""

DEVICE_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[0-9]{1,3})?\Z"

METRICS_MAX = 8
"""Maximum number of metrics of a push."""

METRIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}\Z"

DELTAS_MAX = 64
"""Maximum number of deltas in an assignment's payload."""

DAY_S = 86400.0
"""The length of the period to which a daily quota applies, in seconds."""

HEARTBEAT_BYTES = 128
"""Number of bytes that a quota counts for a ping and its pong together."""

HEADERS_BYTES = 4096
"""Maximum number of bytes that one exchange needs in addition to its payloads."""

PEERS_MAX = 64
"""Maximum number of members in a round of peers, and of entries in a list of peers."""

PEER_ADDRESS_PATTERN = r"^tcp://[A-Za-z0-9.:%_\[\]-]{1,256}:[1-9][0-9]{0,4}\Z"

COUNT_MAX = 2**53
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Unsigned64 = Annotated[int, Meta(ge=0)]
Identity = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = bytes
"""The public key that authenticated a message's connection; empty if the hub has no keys."""

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
DeviceId = Annotated[str, Meta(pattern=DEVICE_ID_PATTERN)]
PeerAddress = Annotated[str, Meta(pattern=PEER_ADDRESS_PATTERN)]
Lineage = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
GraphFingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
CodecName = Annotated[str, Meta(min_length=1, max_length=64)]
Sentence = Annotated[str, Meta(max_length=1024)]
Metrics = Annotated[dict[Annotated[str, Meta(pattern=METRIC_PATTERN)], float], Meta(max_length=METRICS_MAX)]
SECONDS_MAX = 1e9
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
CLOCK_S_MAX = 1e11  # about the year 5000
PaceReason = Annotated[str, Meta(pattern=r"^[ -~]{0,32}\Z")]
"""A short human-readable reason in printable ASCII, without terminal control sequences."""


class ModelVersion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A version of the model: the lineage of the hub's state, and a version number in that lineage."""

    lineage: Lineage
    number: Count


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied", gc=False):
    """The update was applied to the model and is contained in version `number` and all later ones."""

    number: Count


class Buffered(msgspec.Struct, frozen=True, array_like=True, tag="buffered", gc=False):
    """The update is buffered until the next flush. The buffer contains `count` updates."""

    count: Count


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected", gc=False):
    """The update was rejected for good. If `preempted`, restart from the hub's model."""

    reason: Literal[
        "stale", "not_finite", "foreign_lineage", "future_version", "quarantined", "behind", "rolled_back"
    ]
    preempted: bool = False


class Duplicate(msgspec.Struct, frozen=True, array_like=True, tag="duplicate", gc=False):
    """The hub has already answered this update. `first` is the outcome that it sent then."""

    first: Applied | Buffered | Rejected


FirstOutcome = Applied | Buffered | Rejected
Outcome = Applied | Buffered | Rejected | Duplicate


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base class of all messages. `kind` identifies the message type in the header frame."""

    kind: ClassVar[int]


class DeviceProfile(msgspec.Struct, frozen=True, array_like=True):
    """Properties that a device reports about itself, for display and for policies.

    If the device has a quota of its own, `bytes_per_day_max`, it also reports the bytes that are
    left of it in the current period, and the seconds until the next period. `delay_steps` is the
    device's own setting, which replaces the value in `Welcome`; it is 0 if the device has none.
    `same_host` is true if the device reaches the hub over the loopback interface or an IPC socket,
    and does not limit its traffic.
    """

    machine: Annotated[str, Meta(max_length=64)] = ""
    cores: Annotated[int, Meta(ge=1, le=4096)] = 1
    memory_bytes: Count = 0
    examples: Count = 0
    software: Annotated[str, Meta(max_length=64)] = ""
    local_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    bytes_per_day_max: Count = 0
    day_left_bytes: Count = 0
    day_remaining_s: Seconds = 0.0
    delay_steps: Annotated[int, Meta(ge=0, le=2**31)] = 0
    same_host: bool = False


Framework = Literal["jax", "onnx", "torch"]
"""The framework in which a model is defined.

Each framework names arrays differently, so checksums of different frameworks cannot be compared.
"""


class Frozen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checksum of a model's frozen arrays."""

    framework: Framework
    checksum: Fingerprint


OtherFrozen = Literal["refuse", "warn"]
"""How the hub treats a device whose frozen arrays differ: refuse it, or warn and let it train."""


class Hello(Message, frozen=True):
    """Device to hub: my identity and my state. This is the first message on every connection.

    `incarnation` counts how often an agent has started with this state. If two agents have the same
    state id, the one with the higher incarnation replaces the other. `layout` is the fingerprint of
    my model's arrays, ordered by role and name. `frozen` is the checksum of my model's frozen
    arrays. Each of these two is `None` if it is unknown.
    """

    kind = 1
    device_id: DeviceId
    state_id: Identity
    incarnation: Count
    session: Identity | None = None
    seq_answered: Count = 0
    profile: DeviceProfile = DeviceProfile()
    codecs: Annotated[tuple[CodecName, ...], Meta(max_length=32)] = ("identity",)
    fingerprint: Fingerprint | None = None
    piece_bytes_max: Annotated[int, Meta(ge=0, le=2**24)] = 0
    layout: Fingerprint | None = None
    frozen: Frozen | None = None


class Welcome(Message, frozen=True):
    """Hub to device: you are a member; these are the model's layout and the session's settings.

    `graph` is the SHA-256 of the ONNX training graph, if the hub has one, and `base` that of the
    file with the graph's frozen values, if there is one. The device requests both with
    `FetchGraph`. `update` defines whether a push contains a difference or the device's whole model.
    `error_feedback` and `residual_decay` define how the device accumulates the values that a codec
    drops. `overlap_steps_max` is the maximum number of local steps that the device takes while it
    waits for an assignment. The device starts to use an assignment `delay_steps` steps after the
    push that the assignment answers. `checksum_last` is the checksum of push `seq_last`. With it,
    the device can verify that it sent that push. The checksum is 0 if the hub has no record of the
    push.
    """

    kind = 2
    session: Identity
    spec: ParameterSpec
    settings: dict[str, object]
    seq_last: Count
    push_codec: CodecName
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]
    lease_s: Annotated[float, Meta(gt=0, le=86400)]
    piece_bytes: Annotated[int, Meta(ge=2**16, le=2**24)]
    graph: GraphFingerprint | None = None
    graph_bytes: Count = 0
    update: Literal["delta", "model"] = "delta"
    error_feedback: Literal["auto", "always", "never"] = "auto"
    residual_decay: Annotated[float, Meta(ge=0, le=1)] = 1.0
    overlap_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    checksum_last: Unsigned64 = 0
    delay_steps: Annotated[int, Meta(ge=0, le=2**31)] = 0
    base: GraphFingerprint | None = None
    base_bytes: Count = 0


class Fetch(Message, frozen=True):
    """Device to hub: send me an assignment.

    A device sends it after a welcome, and after an assignment was refused or lost. `version` is the
    model version that I have, as received from the hub. `held_checksum` is the checksum of that
    model as float32. `partial` is the checksum of a payload that I have received only in part.
    """

    kind = 3
    session: Identity
    version: ModelVersion | None = None
    partial: Unsigned64 | None = None
    held_checksum: Unsigned64 | None = None


class Push(Message, frozen=True, gc=False):
    """Device to hub: an update after `local_steps` local steps from version `base`.

    The payload is the encoded update.

    `loss_mean` and `loss_variance` are computed over my local steps; they are `None` if I have no
    loss. `score` is the loss of the assigned model on my own held-out examples, if I have any. A
    lower score is better. `overlap_steps` is the number of local steps that I took before the
    assignment arrived. `base_loss` is the loss of the first step after that arrival: the assigned
    model's loss on one of my batches. `held_checksum` is the checksum of my copy of `base`; it is
    `None` if I no longer have a copy. `metrics` are also computed over my local steps, and are
    finite. `validation_loss` is the loss of my parameters after the local steps, on held-out
    examples.

    If `transfer` is above 0, the payload is sent in pieces with this transfer number, once the hub
    grants credit.
    """

    kind = 4
    session: Identity
    seq: Annotated[int, Meta(ge=1, le=2**53)]
    base: ModelVersion
    local_steps: Annotated[int, Meta(ge=1, le=2**31)]
    examples: Count
    loss_mean: float | None
    loss_variance: float | None
    step_s: Seconds
    codec: CodecName
    checksum: Unsigned64
    payload_bytes: Count
    transfer: Count = 0
    score: float | None = None
    overlap_steps: Annotated[int, Meta(ge=0, le=2**31)] = 0
    base_loss: float | None = None
    held_checksum: Unsigned64 | None = None
    metrics: Metrics | None = None
    validation_loss: float | None = None


class Ack(Message, frozen=True, gc=False):
    """Hub to device: the outcome of push `seq`. It is sent alone or inside an `Assignment`."""

    kind = 5
    seq: Count
    outcome: Outcome


class Deltas(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of the assignment contains deltas. Add them in order to version `base`.

    `lengths` are the sizes of the deltas in bytes. `checksum` is the checksum of the resulting
    model as float32. The model is rounded with the codec `rounding` after each addition.
    """

    base: Count
    lengths: Annotated[tuple[Count, ...], Meta(max_length=DELTAS_MAX)]
    checksum: Unsigned64
    rounding: CodecName


class Assignment(Message, frozen=True, gc=False):
    """Hub to device: train `local_steps` steps from this version.

    The payload contains the encoded model or, if `deltas` is set, deltas. If `transfer` is above 0,
    the payload is sent in pieces once the device grants credit. If `push_codec` is set, the device
    encodes all later payloads with that codec. The encoded model may be a lossy copy. The device
    multiplies its own learning rate by `learning_rate_factor` until the next assignment.
    """

    kind = 6
    version: ModelVersion
    local_steps: Annotated[int, Meta(ge=1, le=2**31)]
    codec: CodecName
    checksum: Unsigned64
    payload_bytes: Count
    transfer: Count = 0
    ack: Ack | None = None
    deltas: Deltas | None = None
    push_codec: CodecName | None = None
    learning_rate_factor: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Piece(Message, frozen=True, gc=False):
    """Either direction: the next piece of a transfer.

    The payload frame contains the transfer's bytes from `offset` on.
    """

    kind = 7
    transfer: Count
    offset: Count
    checksum: Unsigned64


class Credit(Message, frozen=True, gc=False):
    """Either direction: I have received the first `received_bytes` of this transfer; 0 starts it."""

    kind = 8
    transfer: Count
    received_bytes: Count


class Ping(Message, frozen=True, gc=False):
    """Device to hub: I am alive.

    I have taken `steps_total` local steps, and the round trip of my last ping took `round_trip_s`.
    I train for `pace_percent` percent of the time: 0 means paused, and less than 100 means slowed
    down. `pace_reason` explains why I am paused or slowed down. `clock_s` is my Unix time.
    """

    kind = 9
    session: Identity
    sent_s: float
    steps_total: Count
    round_trip_s: Seconds = 0.0
    pace_percent: Annotated[int, Meta(ge=0, le=100)] = 100
    pace_reason: PaceReason = ""
    temperature_c: Annotated[float, Meta(ge=-100, le=1000)] | None = None
    clock_s: Annotated[float, Meta(ge=0, le=CLOCK_S_MAX)] | None = None


class Pong(Message, frozen=True, gc=False):
    """Hub to device: the answer to a ping. `sent_s` is copied from the ping."""

    kind = 10
    sent_s: float


class Goodbye(Message, frozen=True):
    """Either direction: the sender ends the session in an orderly way.

    If a hub sends `finished`, the device's work has ended. If a hub sends `stopping`, the hub is
    shutting down, and the device should reconnect later.

    A device sends `stopping` if it leaves. It sends `paused` if a user or program has paused it; it
    will reconnect later.
    """

    kind = 11
    reason: Literal["finished", "stopping", "paused"]
    session: Identity | None = None


RefusalCode = Literal[
    "busy",
    "duplicate_device_id",
    "hub_full",
    "malformed",
    "model_mismatch",
    "not_allowed",
    "protocol_version",
    "quarantined",
    "retired_state",
    "sequence",
    "superseded",
    "unknown_device",
    "unknown_session",
]


class Refuse(Message, frozen=True):
    """Hub to device: your request is refused.

    `code` is stable across releases, and `sentence` is human-readable. Retry after `retry_after_s`
    seconds, if it is set. If the code is `busy` and `rest` is true, the device should idle until
    then. Another `busy` may shorten that time.
    """

    kind = 12
    code: RefusalCode
    sentence: Sentence
    retry_after_s: Seconds | None = None
    rest: bool = False


class StatusRequest(Message, frozen=True):
    """Any client to hub, without a session: send me your status, or your events after a number."""

    kind = 13
    watches: bool = False
    events_after: Count | None = None


class Status(Message, frozen=True):
    """Hub to the sender of a `StatusRequest`: the payload frame contains one JSON object."""

    kind = 14


class FetchGraph(Message, frozen=True):
    """Device to hub: send me the graph named in your welcome or, if `base` is set, its base."""

    kind = 15
    session: Identity
    base: bool = False


class GraphHeader(Message, frozen=True):
    """Hub to device: the training graph or its base.

    The payload is a serialized ONNX model, which the device must validate before it uses it, or the
    file of its frozen values. If `transfer` is above 0, the payload is sent in pieces once the
    device grants credit. The first credit may be at any byte, where an earlier transfer has ended.
    """

    kind = 16
    fingerprint: GraphFingerprint
    checksum: Unsigned64
    payload_bytes: Count
    transfer: Count = 0


class Enrol(Message, frozen=True):
    """Device to hub, authenticated by a token's temporary key: admit my own public key."""

    kind = 17
    key: PublicKey


class Enrolled(Message, frozen=True):
    """Hub to device: your key was added to the allow-list under this name."""

    kind = 18
    name: DeviceId


class Wake(Message, frozen=True):
    """Operator to hub: return the fleet to full pace. The hub answers with a `Status`."""

    kind = 19


class Order(Message, frozen=True):
    """Operator to hub: exclude or release this device and all other devices with its key.

    The hub answers with a `Status`, or with a `Refuse` if it does not know the device. Repeating an
    order has no effect.
    """

    kind = 20
    device_id: DeviceId
    order: Literal["quarantine", "release"]


class FindPeers(Message, frozen=True):
    """Peer with a key to hub, without a session: peers can reach me here; send me their list."""

    kind = 21
    name: DeviceId
    address: PeerAddress


class ListedPeer(msgspec.Struct, frozen=True, array_like=True):
    """A peer in the hub's list: its name in the allow-list, its reported address, and its key."""

    name: DeviceId
    address: PeerAddress
    key: PublicKey


class FoundPeers(Message, frozen=True):
    """Hub to peer: all peers that have sent `FindPeers`, including you, sorted by name."""

    kind = 22
    peers: Annotated[tuple[ListedPeer, ...], Meta(max_length=PEERS_MAX)]


Request = StatusRequest | Wake | Order
"""Messages that need no session and are answered with a `Status`."""

MESSAGES: dict[int, type[Message]] = {
    message.kind: resolve_type(message)
    for message in (
        Hello, Welcome, Fetch, Push, Ack, Assignment, Piece, Credit, Ping, Pong, Goodbye, Refuse,
        StatusRequest, Status, FetchGraph, GraphHeader, Enrol, Enrolled, Wake, Order, FindPeers,
        FoundPeers,
    )
}  # fmt: skip
