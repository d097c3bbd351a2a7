"""The messages of the protocol, as typed and bounded structs.

`docs/reference/wire` specifies them. The order of the fields is their order on the wire.
New fields may only be added at the end, with a default.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeasync.parameters import ParameterSpec
from edgeasync.structs import resolve_type

PROTOCOL_VERSION = 1
"""The protocol version in every header. A hub and a device of different versions refuse each other.
"""

DEVICE_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[0-9]{1,3})?\Z"

METRICS_MAX = 8
"""Maximum number of metrics of a push."""

METRIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}\Z"

DELTAS_MAX = 64
"""Maximum number of deltas in an assignment's payload."""

DAY_S = 86400.0
"""The period of a daily quota."""

HEARTBEAT_BYTES = 128
"""Bytes of a ping and its answer."""

HEADERS_BYTES = 4096
"""Maximum bytes of an exchange in addition to its payloads."""

PEERS_MAX = 64
"""Maximum number of members of a round of peers, and of names in a list of peers."""

PEER_ADDRESS_PATTERN = r"^tcp://[A-Za-z0-9.:%_\[\]-]{1,256}:[1-9][0-9]{0,4}\Z"

COUNT_MAX = 2**53
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Unsigned64 = Annotated[int, Meta(ge=0)]
Identity = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = bytes
"""The public key under which a message arrived; empty without keys."""

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
PaceReason = Annotated[str, Meta(pattern=r"^[ -~]{0,32}\Z")]
"""A few human-readable words in printable ASCII, without terminal control sequences."""


class ModelVersion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A version of the model: the lineage of the hub's state, and the number in that lineage."""

    lineage: Lineage
    number: Count


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied", gc=False):
    """The update is part of the model since version `number`."""

    number: Count


class Buffered(msgspec.Struct, frozen=True, array_like=True, tag="buffered", gc=False):
    """The update waits for the next flush, as one of `count` updates."""

    count: Count


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected", gc=False):
    """The update will never count. If `preempted`, start over from the hub's model."""

    reason: Literal[
        "stale", "not_finite", "foreign_lineage", "future_version", "quarantined", "behind", "rolled_back"
    ]
    preempted: bool = False


class Duplicate(msgspec.Struct, frozen=True, array_like=True, tag="duplicate", gc=False):
    """The update was answered before; `first` is the earlier outcome."""

    first: Applied | Buffered | Rejected


FirstOutcome = Applied | Buffered | Rejected
Outcome = Applied | Buffered | Rejected | Duplicate


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base class of all messages; `kind` is the number in the header frame."""

    kind: ClassVar[int]


class DeviceProfile(msgspec.Struct, frozen=True, array_like=True):
    """What a device reports about itself, for people and policies.

    With its own quota, `bytes_per_day_max`, it reports how many bytes and seconds of its day are
    left. It uses an assignment its own `delay_steps` after the push that was answered; 0 means no
    own delay.
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


Framework = Literal["jax", "onnx", "torch"]
"""The framework of a model. Checksums of different frameworks cannot be compared.

Each framework names arrays in its own way.
"""


class Frozen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checksum of a model's frozen arrays."""

    framework: Framework
    checksum: Fingerprint


OtherFrozen = Literal["refuse", "warn"]
"""How to treat a device whose frozen arrays differ: refuse it, or let it train and warn."""


class Hello(Message, frozen=True):
    """Device to hub: my identity and my state. The first message on every connection.

    `incarnation` counts the starts of an agent on this state. Of two agents with the same state id,
    the higher incarnation wins. `layout` is the fingerprint of my model's arrays, in the order of
    their roles and names. `frozen` is the checksum of its frozen arrays. Both are `None` if
    unknown.
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
    """Hub to device: you are a member; this is the model's layout, and how to communicate.

    `graph` is the SHA-256 of the ONNX training graph, if the hub has one; the device requests it
    with `FetchGraph`. `update` tells what a push contains: a difference, or the device's whole
    model. `error_feedback` and `residual_decay` tell how the device keeps what a codec drops.
    `overlap_steps_max` is the maximum number of steps while it waits for an assignment. It uses an
    assignment `delay_steps` after the push that was answered. `checksum_last` is that of push
    `seq_last`, so that a device can tell whether that push was its own; 0 if the hub has no record.
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


class Fetch(Message, frozen=True):
    """Device to hub: send me an assignment (after a welcome, or after one was refused or lost).

    `version` is the one I have, as the hub sent it; `held_checksum` is that of the model as
    float32. `partial` is the checksum of a payload of which I have the beginning.
    """

    kind = 3
    session: Identity
    version: ModelVersion | None = None
    partial: Unsigned64 | None = None
    held_checksum: Unsigned64 | None = None


class Push(Message, frozen=True, gc=False):
    """Device to hub: the result of `local_steps` steps from `base`.

    The payload is the encoded update.

    `loss_mean` and `loss_variance` are of my local steps; `None` if I have no loss. `score` is the
    loss of the assigned model on held-out examples of my own, if I have some; low is good.
    `overlap_steps` is the number of local steps before the assignment arrived. `base_loss` is the
    loss of the first step after it, that is of the assigned model on one of my batches.
    `held_checksum` is that of `base` as I have it; `None` if I no longer do. `metrics` are of my
    local steps, too, and finite. `validation_loss` is that of my parameters after the steps, on
    held-out examples.

    With `transfer` above 0, the payload follows in pieces of that transfer once the hub grants
    credit.
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
    """Hub to device: the outcome of push `seq`. Sent alone or inside an `Assignment`."""

    kind = 5
    seq: Count
    outcome: Outcome


class Deltas(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An assignment's payload contains deltas, to be added in order to the version `base`.

    `lengths` are their sizes in bytes. `checksum` is that of the resulting model as float32. Every
    sum is rounded with the codec `rounding`.
    """

    base: Count
    lengths: Annotated[tuple[Count, ...], Meta(max_length=DELTAS_MAX)]
    checksum: Unsigned64
    rounding: CodecName


class Assignment(Message, frozen=True, gc=False):
    """Hub to device: train `local_steps` steps from this version.

    The payload is the encoded model, or `deltas`. With `transfer` above 0, the payload follows in
    pieces once the device grants credit. `push_codec`, if set, is the codec for the device's
    payloads from now on. The encoded model may be coarse. The device multiplies its own learning
    rate by `learning_rate_factor` until the next assignment.
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
    """Either way: the next part of a transfer.

    The payload frame contains the bytes from `offset` on.
    """

    kind = 7
    transfer: Count
    offset: Count
    checksum: Unsigned64


class Credit(Message, frozen=True, gc=False):
    """Either way: I have the first `received_bytes` of this transfer; 0 starts the transfer."""

    kind = 8
    transfer: Count
    received_bytes: Count


class Ping(Message, frozen=True, gc=False):
    """Device to hub: I am alive.

    I have taken `steps_total` local steps, and my last ping took `round_trip_s`. I train in
    `pace_percent` of the time: 0 while I pause, less than 100 while slowed. `pace_reason` is the
    reason.
    """

    kind = 9
    session: Identity
    sent_s: float
    steps_total: Count
    round_trip_s: Seconds = 0.0
    pace_percent: Annotated[int, Meta(ge=0, le=100)] = 100
    pace_reason: PaceReason = ""
    temperature_c: Annotated[float, Meta(ge=-100, le=1000)] | None = None


class Pong(Message, frozen=True, gc=False):
    """Hub to device: the answer to a ping, with its `sent_s` unchanged."""

    kind = 10
    sent_s: float


class Goodbye(Message, frozen=True):
    """Either way: a clean goodbye.

    From a hub, `finished` ends the device's work; `stopping` does not.

    `paused` means that a person or program has paused the device, and that it will return.
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
    """Hub to device: a refusal, with a stable code, a human-readable sentence, and when to retry.

    With `busy`, `rest` asks the device to idle until then. Another `busy` may shorten that time.
    """

    kind = 12
    code: RefusalCode
    sentence: Sentence
    retry_after_s: Seconds | None = None
    rest: bool = False


class StatusRequest(Message, frozen=True):
    """Anyone to hub: send me your status. Needs no session."""

    kind = 13


class Status(Message, frozen=True):
    """Hub to the sender of a `StatusRequest`: the payload frame is one JSON object."""

    kind = 14


class FetchGraph(Message, frozen=True):
    """Device to hub: send me the graph that your welcome names, because I do not have it."""

    kind = 15
    session: Identity


class GraphHeader(Message, frozen=True):
    """Hub to device: the training graph.

    The payload is a serialized ONNX model, to be screened before use. With `transfer` above 0, it
    follows in pieces once the device grants credit.
    """

    kind = 16
    fingerprint: GraphFingerprint
    checksum: Unsigned64
    payload_bytes: Count
    transfer: Count = 0


class Enrol(Message, frozen=True):
    """Device to hub, under a token's temporary key: this is my own public key, admit it."""

    kind = 17
    key: PublicKey


class Enrolled(Message, frozen=True):
    """Hub to device: your key is listed under this name."""

    kind = 18
    name: DeviceId


class Wake(Message, frozen=True):
    """Operator to hub: bring the fleet back to its full pace. The answer is a `Status`."""

    kind = 19


class Order(Message, frozen=True):
    """Operator to hub: exclude this device and others with its key, or release them.

    The answer is a `Status`, or a `Refuse` if the hub does not know the device. A repeated order
    has no effect.
    """

    kind = 20
    device_id: DeviceId
    order: Literal["quarantine", "release"]


class FindPeers(Message, frozen=True):
    """Peer to hub: the other peers reach me at this address; tell me who they are.

    It needs a key, but no session.
    """

    kind = 21
    name: DeviceId
    address: PeerAddress


class ListedPeer(msgspec.Struct, frozen=True, array_like=True):
    """A peer as a hub knows it: the name of its key, the address it has reported, and its key."""

    name: DeviceId
    address: PeerAddress
    key: PublicKey


class FoundPeers(Message, frozen=True):
    """Hub to peer: all peers that have asked me, including you, sorted by name."""

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
