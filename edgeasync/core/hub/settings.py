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
    """Return the number of updates and of seconds between two events, one infinite.

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
    """When the hub marks a device as lost, and when as paused."""

    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Time between two pings of a device, also while it trains."""
    lease_s: Annotated[float, Meta(gt=0, le=86400)] = 15.0
    """The hub marks a device as lost after this time without a message from it. A device that hears
    nothing from its hub for this time opens a new connection, at the latest after 3600 s. Must be
    longer than `heartbeat_s`.
    """
    progress_s: Annotated[float, Meta(gt=0)] = 300.0
    """The hub shows a device as `paused` if it pings but takes no local step for this time."""

    def __post_init__(self) -> None:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(f"lease_s ({self.lease_s:g}) must be longer than heartbeat_s ({self.heartbeat_s:g})")


class Limits(Section, frozen=True):
    """Limits of a hub. Above a limit, it refuses a request with a time to retry."""

    devices_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Devices that the hub remembers, live or not. One key may have a quarter of them. When the
    limit is reached, a new device replaces an offline one. The hub picks the key with the most
    devices, and evicts the device that it has not heard from for longest. If no device is offline,
    the hub refuses the new one.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] = PARAMETERS_MAX
    """Largest number of parameters; the hub refuses a larger model when it starts."""
    piece_bytes: ByteCount = ByteCount(1 << 20)
    """Size of pieces in which the hub and its devices send larger payloads. While the hub verifies
    a payload sent in one message, heartbeats wait.
    """
    updates_held_max: Annotated[int, Meta(ge=1)] = 64
    """Updates in memory at once, both arriving in pieces and buffered for a fold. Each is a whole
    payload; as `identity`, 64 updates of 10 million parameters take 2.6 GB. When this many updates
    are buffered, the hub folds them under any aggregator. For a fold of one update per device, set
    it to at least the number of devices.
    """
    snapshots_max: Annotated[int, Meta(ge=2)] = 32
    """Versions of the model in memory at once: the newest, and older ones that the hub still sends
    in payloads of 64 KiB or more. Also limits how many devices download the graph of an ONNX model
    at the same time.
    """
    strikes_max: Annotated[int, Meta(ge=1)] = 20
    """Malformed messages after which the hub quarantines a device."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 300.0
    """Duration of a quarantine. For a key, or a connection without keys, that has not joined, it
    counts from the last malformed message.
    """
    retry_after_s: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] = 0.5
    """How long a device waits before it retries if the hub is busy, at most 3600 s."""
    connections_per_key_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    """Maximum connections per key: one for each agent on a board, plus old ones that have not
    closed yet. No effect without keys.
    """
    bytes_per_day_max: ByteCount | None = None
    """Daily quota of all devices together, both directions. See [Bytes of a
    day](/devices/network.md#bytes-of-a-day).
    """
    device_bytes_per_day_max: ByteCount | None = None
    """Daily quota of each device, both directions. Both quotas must be at least twice the traffic
    of a device's pings, 2.2 MB with the default `heartbeat_s`.
    """

    def __post_init__(self) -> None:
        if not PIECE_BYTES_MIN <= self.piece_bytes <= PIECE_BYTES_MAX:
            raise ValueError("piece_bytes must be from 64 KiB to 16 MiB")


class CodecSettings(Section, frozen=True):
    """`[codec]`: the codecs of payloads, by the names of the wire protocol.

    `push` encodes updates, `model` encodes whole models, and `delta` encodes the differences
    between two published versions. Published versions form one chain for all devices. A version
    made of several updates is published at once. If every update makes a version, the hub publishes
    at most one per `publish_s`. Without that setting, it publishes at most four in the usual time
    between two exchanges of a device. A device that does not support a codec uses `identity`.
    """

    push: str = "auto"
    """Codec of updates: any codec, or `"auto"`. With `"auto"`, the hub chooses for each device by
    its measured link. It starts with `int8`, and changes to `top_k(0.1)+int8` on a slow link. A
    link is slow if it carries less than 10 MB/s, and an upload in `int8` takes more than a tenth of
    the time for eight local steps and a round trip. The fastest of the last 32 exchanges counts, so
    that a busy machine is not mistaken for a slow link. The hub returns to `int8` if that would
    take a twentieth, 32 exchanges in a row. Updates up to 4 KiB always use `identity`. Under
    `model_average`, `"auto"` means `float16`; `identity`, `float16` and `bfloat16` are allowed.
    """
    model: str = "float16"
    """Codec of whole models: `identity`, `float16` or `bfloat16`. The hub sends a whole model to a
    device that joins, rejoins or has missed too many versions. If a value is too
    large for the codec, the hub uses `identity` instead. With `delta = "int8"`, the hub sends the
    whole model in `int8`, at half the size, to devices that join later or rejoin. The differences
    that follow correct the rounding error; see [decision
    0014](/decisions/0014-send-deltas-along-one-published-chain.md).
    """
    delta: str = "int8"
    """Codec of the differences between versions, which all other devices get: any codec but `auto`.
    With `"off"`, the hub always sends the whole model.
    """
    publish_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Minimum time between two versions that the hub publishes. Applies to `immediate` and
    `model_average`, where every update makes a version. By default, the hub publishes four versions
    in the usual period between two exchanges. No effect under other aggregators, or with `delta =
    "off"`.
    """
    error_feedback: Literal["auto", "always", "never"] = "auto"
    """Whether a device adds the part that its codec dropped (the residual) to its next update.
    `"auto"` does so with `top_k` and `sign`. The residual needs memory for one more vector on the
    device.
    """
    residual_decay: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Factor of the residual for every new version, including versions that the device missed.
    Below 1, training is faster, since devices learn much of the residual again. 1 keeps all of it,
    and ends a little more accurate. 0 drops it.
    """

    def __post_init__(self) -> None:
        for name in (self.push, self.model, self.delta):
            if name not in ("auto", "off"):
                check_codec_name(name)
        if self.push == "off":
            raise ValueError("push cannot be 'off': devices must send updates; use 'identity' for float32")
        if self.model not in ELEMENTWISE:
            raise ValueError(
                f"model = {self.model!r} is not a codec of whole models; use one of {', '.join(ELEMENTWISE)}"
            )
        if self.delta == "auto":
            raise ValueError(
                "delta cannot be 'auto': all devices receive the same differences; set a codec or 'off'"
            )


FLOAT32 = CodecSettings(push="identity", model="identity", delta="off")
"""No compression: four bytes per value."""


class CheckpointSettings(Section, frozen=True):
    """`[checkpoint]`: how often a hub saves its state, how many it keeps, where it resumes.

    The hub also writes a checkpoint at the end, and when the journal has grown too large. While
    nothing changes, it writes none.
    """

    every: str = "1 minute"
    """Time or updates between two checkpoints: `"1000 updates"`, `"30 seconds"`, `"10 minutes"` or
    `"1 hour"`.
    """
    keep: Annotated[int, Meta(ge=2, le=10_000)] = 3
    """Number of checkpoints to keep, besides the best one."""
    recovery: Annotated[str, Meta(min_length=1)] = "latest"
    """Checkpoint to resume from: `latest`, `best`, or a name. `latest` also replays the journal
    after it. The others start a new branch, and the hub refuses updates from later versions. The
    run's folder and `edgeasync runs --json` list the names. In a settings file this would reset the
    run at every start, so prefer the flag for a single start. Refused for a folder without a
    checkpoint.
    """
    journal_bytes_max: ByteCount = ByteCount(256 << 20)
    """Journal growth after which the hub writes a checkpoint, but at least the size of eight
    models. The hub then drops the journal before the second newest checkpoint.
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
    hub runs an ONNX model in evaluation mode (no dropout, batch norms with their running
    statistics). This needs the forward model, so the hub refuses a prebuilt training graph.
    """
    every: str = "100 updates"
    """Applied updates, or time, between two evaluations: seconds (`s`), minutes (`min`) or hours
    (`h`). With a time, the hub evaluates the first version made after it. In an idle fleet, the hub
    evaluates every version, but at most every 10 s. It skips an evaluation while another one runs.
    """

    def __post_init__(self) -> None:
        parse_every(self.every)


class StopPlateau(Section, frozen=True):
    """`[hub.stop.plateau]`: end training when evaluations stop improving.

    An evaluation improves by its accuracy, or without held-out data by its loss. If both `updates`
    and `minutes` are set, both must pass.
    """

    updates: Annotated[int, Meta(ge=1)] | None = None
    """Applied updates since the last better evaluation."""
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """Minutes since the last better evaluation, without downtime of the hub."""
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 0.001
    """Minimum improvement: the least rise of the accuracy, or the least share by which the loss
    falls.
    """

    def __post_init__(self) -> None:
        if self.updates is None and self.minutes is None:
            raise ValueError("plateau needs a duration: set updates, minutes or both")


class StopCondition(Section, frozen=True):
    """When training is finished. Conditions that are not set never end it."""

    updates: Annotated[int, Meta(ge=1)] | None = None
    """End when the hub has applied this number of updates in this run, over all its starts. A
    version usually contains several updates, so the final count may be slightly higher.
    """
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """End when the hub has run for this long in this run, without downtime."""
    loss: Annotated[float, Meta(ge=0)] | None = None
    """End when an evaluation finds at most this loss; see `[evaluation]`. Without held-out data and
    losses from devices, the hub cannot evaluate, and warns.
    """
    accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None
    """End when an evaluation finds at least this accuracy, from 0 to 1. Refused without
    `evaluation.data`, and for any loss but `cross_entropy`, since no other loss has an accuracy.
    """
    plateau: StopPlateau | None = None
    """End when evaluations stop improving; see `[hub.stop.plateau]`."""


class HubCoreSettings(Section, frozen=True):
    """All settings of the hub's core. They are fixed for a run.

    With `held_out`, the hub evaluates the model; a `Hub` with an evaluator sets it. Otherwise the
    loss that most devices reach replaces an evaluation. With `quiet` and an adaptive frequency,
    devices idle while training has plateaued.

    `frozen` decides what happens to a device whose frozen arrays differ from the hub's. A `Hub`
    sets their checksum, `frozen_arrays`. Without it, the hub compares all devices with the first
    one.
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
    """Raise `ValueError` for a daily quota that a device's pings would use up."""
    pings_bytes = round(DAY_S / liveness.heartbeat_s) * HEARTBEAT_BYTES
    for name in ("bytes_per_day_max", "device_bytes_per_day_max"):
        most = getattr(limits, name)
        if most is not None and most < 2 * pings_bytes:
            raise ValueError(
                f"limits.{name} is {most} bytes, but a device's pings alone take {pings_bytes} bytes a day; "
                f"set at least {2 * pings_bytes}, or a longer liveness.heartbeat_s"
            )
