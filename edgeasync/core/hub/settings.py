"""Settings of the hub's core: liveness, limits, codecs, checkpoints, and the end of training."""

import math
import re
from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.config import ByteCount, FilePath, Section
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.codecs import ELEMENTWISE, check_codec_name
from edgeasync.protocol.messages import DAY_S, HEARTBEAT_BYTES, SECONDS_MAX, Frozen, OtherFrozen
from edgeasync.protocol.transfers import PIECE_BYTES_MAX, PIECE_BYTES_MIN

_SECONDS = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_EVERY = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*(update|{'|'.join(_SECONDS)})s?\s*")


def parse_every(every: str) -> tuple[float, float]:
    """Parse a period; return it as updates and as seconds, one of which is infinite.

    Raises `ValueError` for invalid text.
    """
    match = _EVERY.fullmatch(every)
    if match is None:
        raise ValueError(f"every = {every!r} is invalid; write it as '1000 updates', '30 seconds' or '10 minutes'")
    number, unit = float(match[1]), match[2]
    if not 0 < number < math.inf or (unit == "update" and number % 1):
        raise ValueError(f"every = {every!r}: the number must be above 0, and whole for updates")
    return (number, math.inf) if unit == "update" else (math.inf, number * _SECONDS[unit])


class Liveness(Section, frozen=True):
    """When the hub marks a device as lost or as paused."""

    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Time between two pings that a device sends, also while it trains."""
    lease_s: Annotated[float, Meta(gt=0, le=86400)] = 15.0
    """Time without a message from a device after which the hub marks it as lost. A device that
    receives nothing from its hub for this time, or for 3600 s if that is shorter, opens a new
    connection. Must be longer than `heartbeat_s`.
    """
    progress_s: Annotated[float, Meta(gt=0)] = 300.0
    """Time without a local step after which a device is shown as `paused`, even if it still sends
    pings.
    """

    def __post_init__(self) -> None:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(f"lease_s ({self.lease_s:g}) must be longer than heartbeat_s ({self.heartbeat_s:g})")


class Limits(Section, frozen=True):
    """Limits of a hub. At a limit, the hub refuses requests and names a time to retry."""

    devices_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Maximum number of devices that the hub remembers, connected or not. One key may register a
    quarter of them. When the limit is reached, a new device replaces an offline one: the hub
    selects the key with the most devices and evicts its device with the oldest last message. If all
    devices are online, the hub refuses the new device.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] = PARAMETERS_MAX
    """Maximum number of parameters; the hub does not start with a larger model."""
    piece_bytes: ByteCount = ByteCount(1 << 20)
    """Size of the pieces into which the hub and its devices split larger payloads. While the hub
    verifies a payload that was sent in one message, it cannot answer heartbeats.
    """
    updates_held_max: Annotated[int, Meta(ge=1)] = 64
    """Maximum number of updates in memory, counting both updates that arrive in pieces and updates
    buffered for a fold. Each occupies the memory of its payload: 64 updates of 10 million
    parameters, encoded as `identity`, take 2.6 GB. When this many updates are buffered, the hub
    folds them, whichever aggregator is configured. To fold one update per device, set it to at
    least the number of devices.
    """
    snapshots_max: Annotated[int, Meta(ge=2)] = 32
    """Maximum number of model versions in memory: the newest one, and older ones that the hub is
    still sending in payloads of 64 KiB or more. This also limits how many devices can download the
    graph of an ONNX model at the same time.
    """
    strikes_max: Annotated[int, Meta(ge=1)] = 20
    """Number of malformed messages after which the hub quarantines a device."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 300.0
    """Duration of a quarantine. A key that has not joined stays in quarantine for this time after
    its last malformed message. Without keys, this applies to a connection that has not joined.
    """
    retry_after_s: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] = 0.5
    """Time after which a device retries if the hub is busy, at most 3600 s."""
    connections_per_key_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    """Maximum number of connections per key. Allow one for each agent on a board, plus old
    connections that have not closed yet. No effect without keys.
    """
    bytes_per_day_max: ByteCount | None = None
    """Daily quota that all devices share, counting both directions. See [Bytes of a
    day](/devices/network.md#bytes-of-a-day).
    """
    device_bytes_per_day_max: ByteCount | None = None
    """Daily quota of each device, counting both directions. `bytes_per_day_max` and this quota must
    each be at least twice the daily traffic of one device's pings. With the default `heartbeat_s`,
    the pings take 2.2 MB a day.
    """

    def __post_init__(self) -> None:
        if not PIECE_BYTES_MIN <= self.piece_bytes <= PIECE_BYTES_MAX:
            raise ValueError("piece_bytes must be from 64 KiB to 16 MiB")


class CodecSettings(Section, frozen=True):
    """`[codec]`: the codecs of payloads, by their names in the wire protocol.

    `push` encodes updates, `model` encodes whole models, and `delta` encodes the differences
    between two published versions. All devices follow the same chain of published versions. A
    version that combines several updates is published immediately. If every update creates a
    version, the hub publishes at most one version per `publish_s`. If `publish_s` is not set, the
    hub publishes at most four versions during the usual time between two exchanges of a device. A
    device that does not support a codec uses `identity`.
    """

    push: str = "auto"
    """Codec of updates: any codec, or `"auto"`. With `"auto"`, the hub selects a codec for each
    device, based on the measured bandwidth of its link. It starts with `int8`, and changes to
    `top_k(0.1)+int8` if the link is slow. A link is slow if its bandwidth is below 10 MB/s, and
    uploading an update in `int8` takes more than a tenth of the time that eight local steps and a
    round trip take. The hub uses the fastest of the last 32 exchanges, so that it does not mistake
    a busy machine for a slow link. It returns to `int8` if, in 32 consecutive exchanges, an upload
    in `int8` would take less than a twentieth of that time. Updates of up to 4 KiB always use
    `identity`. Under `model_average`, `"auto"` means `float16`, and only `identity`, `float16` and
    `bfloat16` are allowed. On a fast link, encoding takes longer than sending. Therefore, with
    `"auto"`, a device on the hub's own machine, or one with at least 170 MB/s, sends and receives
    everything as `identity`, and the hub sends it the newest version as a whole. Daily quotas and
    the device's own limits on traffic disable this.
    """
    model: str = "float16"
    """Codec of whole models: `identity`, `float16` or `bfloat16`. The hub sends a whole model to a
    device that joins, rejoins or has missed too many versions. If the codec cannot represent a
    value because it is too large, the hub uses `identity` instead. With `delta = "int8"`, devices
    that join later or rejoin receive the whole model in `int8`, which halves its size. The
    differences that follow correct the rounding error; see [decision
    0014](/decisions/0014-send-deltas-along-one-published-chain.md).
    """
    delta: str = "int8"
    """Codec of the differences between versions, which the hub sends to devices that have a recent
    version: any codec but `auto`. With `"off"`, the hub always sends the whole model.
    """
    publish_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Minimum time between two versions that the hub publishes. It applies only to `immediate` and
    `model_average`, under which every update creates a version. By default, the hub publishes four
    versions in the usual period between two exchanges of a device. No effect under other
    aggregators, or with `delta = "off"`.
    """
    error_feedback: Literal["auto", "always", "never"] = "auto"
    """Whether a device adds the part that its codec dropped (the residual) to its next update.
    `"auto"` enables this for `top_k` and `sign`. The residual needs memory on the device for one
    more vector of the model's size.
    """
    residual_decay: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Factor by which a device multiplies its residual for every new version, including versions
    that it missed. With a factor below 1, training is faster, since devices learn much of the
    residual again. With 1, the whole residual is kept, and the final accuracy is slightly higher.
    With 0, the residual is dropped.
    """

    def __post_init__(self) -> None:
        for name in (self.push, self.model, self.delta):
            if name not in ("auto", "off"):
                check_codec_name(name)
        if self.push == "off":
            raise ValueError("push cannot be 'off': devices must send updates; use 'identity' for float32")
        if self.model not in ELEMENTWISE:
            raise ValueError(
                f"model = {self.model!r} cannot encode whole models; use one of {', '.join(ELEMENTWISE)}"
            )
        if self.delta == "auto":
            raise ValueError(
                "delta cannot be 'auto': all devices receive the same differences; set a codec or 'off'"
            )


FLOAT32 = CodecSettings(push="identity", model="identity", delta="off")
"""No compression: each value takes four bytes."""


class CheckpointSettings(Section, frozen=True):
    """`[checkpoint]`: how often a hub saves its state, and from which state it resumes.

    The hub also writes a checkpoint when it ends, and when the journal has grown too large. If
    nothing has changed since the last checkpoint, it does not write another one.
    """

    every: str = "1 minute"
    """Time or number of updates between two checkpoints: `"1000 updates"`, `"30 seconds"`, `"10
    minutes"` or `"1 hour"`.
    """
    keep: Annotated[int, Meta(ge=2, le=10_000)] = 3
    """Number of checkpoints to keep, besides the best one."""
    recovery: Annotated[str, Meta(min_length=1)] = "latest"
    """Checkpoint to resume from: `latest`, `best`, or a name. With `latest`, the hub also replays
    the journal written after that checkpoint. With any other value, it starts a new branch, and
    refuses updates that are based on later versions. The run's folder and `edgeasync runs --json`
    list the names. If this is set in a settings file, the run is reset at every start, so prefer
    the flag for a single start. The hub does not start if the folder has no checkpoint.
    """
    journal_bytes_max: ByteCount = ByteCount(256 << 20)
    """Size by which the journal may grow before the hub writes a checkpoint. If this is less than
    eight times the size of the model, that size applies instead. After the checkpoint, the hub
    deletes the part of the journal that precedes the second newest checkpoint.
    """

    def __post_init__(self) -> None:
        parse_every(self.every)

    @property
    def every_s(self) -> float:
        """Seconds between two checkpoints; infinite if `every` is a number of updates."""
        return parse_every(self.every)[1]

    @property
    def every_updates(self) -> float:
        """Updates between two checkpoints; infinite if `every` is a time."""
        return parse_every(self.every)[0]


class EvaluationSettings(Section, frozen=True):
    """`[evaluation]`: how often to evaluate the model, and on which data.

    Without data, the hub uses the devices' losses.
    """

    data: FilePath | None = None
    """File of held-out examples that no device trains on, in the format of an agent's `data`. The
    hub runs an ONNX model in evaluation mode: dropout is disabled, and batch norms use their
    running statistics. This requires the forward model, so the hub does not accept a prebuilt
    training graph.
    """
    every: str = "100 updates"
    """Number of applied updates, or time, between two evaluations. Units of time are seconds (`s`),
    minutes (`min`) and hours (`h`). If it is a time, the hub evaluates the first version created
    after that time. While the fleet is idle, the hub evaluates every version, but at most one every
    10 s. It skips an evaluation while another one runs.
    """

    def __post_init__(self) -> None:
        parse_every(self.every)


class StopPlateau(Section, frozen=True):
    """`[hub.stop.plateau]`: end training when evaluations stop improving.

    With held-out data, an evaluation improves if its accuracy rises. Without held-out data, it
    improves if its loss falls. If both `updates` and `minutes` are set, training ends only after
    both limits have passed without an improvement.
    """

    updates: Annotated[int, Meta(ge=1)] | None = None
    """End after this number of applied updates without a better evaluation."""
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """End after this number of minutes without a better evaluation. Downtime of the hub does not
    count.
    """
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 0.001
    """Minimum improvement of an evaluation: the absolute increase of the accuracy, or the relative
    decrease of the loss.
    """

    def __post_init__(self) -> None:
        if self.updates is None and self.minutes is None:
            raise ValueError("plateau needs a duration: set updates, minutes or both")


class StopCondition(Section, frozen=True):
    """Conditions under which training is finished. A condition that is not set has no effect."""

    updates: Annotated[int, Meta(ge=1)] | None = None
    """End when the hub has applied this number of updates during the whole run, including earlier
    starts. A version usually contains several updates, so the final number may be slightly higher.
    """
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """End when the hub has been running for this number of minutes in total, including earlier
    starts. Downtime does not count.
    """
    loss: Annotated[float, Meta(ge=0)] | None = None
    """End when an evaluation measures a loss of at most this value; see `[evaluation]`. If there
    are neither held-out data nor losses from devices, the hub cannot evaluate the model, and logs a
    warning.
    """
    accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None
    """End when an evaluation measures at least this accuracy, from 0 to 1. This requires
    `evaluation.data` and the loss `cross_entropy`, since no other loss has an accuracy.
    """
    plateau: StopPlateau | None = None
    """End when evaluations stop improving; see `[hub.stop.plateau]`."""


class HubCoreSettings(Section, frozen=True):
    """All settings of the hub's core. They are fixed for a run.

    A `Hub` with an evaluator sets `held_out`, and evaluates the model on held-out data. Without
    `held_out`, the hub uses the loss that most devices reach instead. With `quiet` and an adaptive
    frequency, devices idle while training has plateaued.

    `frozen` decides what happens to a device whose frozen arrays differ from the hub's. A `Hub`
    sets the checksum of its frozen arrays in `frozen_arrays`. If that is not set, the hub compares
    every device with the first one that joined.
    """

    liveness: Liveness = Liveness()
    limits: Limits = Limits()
    stop: StopCondition = StopCondition()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    quiet: bool = False
    held_out: bool = False
    codec: CodecSettings = CodecSettings()
    frozen: OtherFrozen = "refuse"
    frozen_arrays: Frozen | None = None

    def __post_init__(self) -> None:
        check_day(self.limits, self.liveness)


def check_day(limits: Limits, liveness: Liveness) -> None:
    """Raise `ValueError` if a device's pings would take more than half of a daily quota."""
    pings_bytes = round(DAY_S / liveness.heartbeat_s) * HEARTBEAT_BYTES
    for name in ("bytes_per_day_max", "device_bytes_per_day_max"):
        most = getattr(limits, name)
        if most is not None and most < 2 * pings_bytes:
            raise ValueError(
                f"limits.{name} is {most} bytes, but a device's pings take {pings_bytes} bytes a day, more than "
                f"half of it; set at least {2 * pings_bytes}, or a longer liveness.heartbeat_s"
            )
