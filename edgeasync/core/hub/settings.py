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
    """Return a number of updates and of seconds, one of them infinite; raises `ValueError`."""
    match = _EVERY.fullmatch(every)
    if match is None:
        raise ValueError(f"every = {every!r}: write it as '1000 updates', '30 seconds' or '10 minutes'")
    number, unit = float(match[1]), match[2]
    if not 0 < number < math.inf or (unit == "update" and number % 1):
        raise ValueError(f"every = {every!r}: give a number over 0; of updates a whole one")
    return (number, math.inf) if unit == "update" else (math.inf, number * _SECONDS[unit])


class Liveness(Section, frozen=True):
    """When a silent device counts as lost, and an idle one as paused."""

    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Time between two pings of a device, also while it trains."""
    lease_s: Annotated[float, Meta(gt=0, le=86400)] = 15.0
    """The hub counts a device as lost after this time of silence. A device that hears nothing from its hub for
    this time opens a new connection; it waits at most 3600 s. Must be longer than `heartbeat_s`.
    """
    progress_s: Annotated[float, Meta(gt=0)] = 300.0
    """The hub shows a device as `paused` if it pings, but takes no local step for this time."""

    def __post_init__(self) -> None:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(f"lease_s ({self.lease_s:g}) must be longer than heartbeat_s ({self.heartbeat_s:g})")


class Limits(Section, frozen=True):
    """The most that a hub accepts. Above a limit it tells a device when to try again."""

    devices_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Devices that the hub remembers, alive or not. One key has at most a fourth of the places. If no place is
    free, the hub forgets a silent device for a newcomer: of the key with the most names, the one gone longest. If
    no device is silent, the hub is full.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] = PARAMETERS_MAX
    """The hub refuses a larger model at the start."""
    piece_bytes: ByteCount = ByteCount(1 << 20)
    """The hub and its devices send a larger payload in pieces of at most this size. While the hub checks a payload
    in one message, heartbeats wait.
    """
    updates_held_max: Annotated[int, Meta(ge=1)] = 64
    """Updates in memory at once: those that arrive in pieces, and those that wait for their fold. Each is a whole
    payload; as `identity`, 64 updates of 10 million parameters are 2.6 GB. As soon as this number of updates
    waits, the hub folds them, under any aggregator. If a version is to have an update of every device, this number
    must be at least the number of devices.
    """
    snapshots_max: Annotated[int, Meta(ge=2)] = 32
    """Versions of the model in memory at once: the newest, and older ones that the hub is still sending in
    payloads of 64 KiB or more. `snapshots_max` also limits how many devices get the graph of an ONNX model at
    once.
    """
    strikes_max: Annotated[int, Meta(ge=1)] = 20
    """Malformed messages after which the hub puts a device in quarantine."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 300.0
    """How long the device stays there. A key, or a connection without keys, that is not a member yet stays there
    for that long after its last malformed message.
    """
    retry_after_s: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] = 0.5
    """How long a device waits before it tries again if the hub has no room, at most 3600 s."""
    connections_per_key_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    """The most connections under one key: one for each agent on a board, and old ones that have not ended yet.
    Without keys it has no effect.
    """
    bytes_per_day_max: ByteCount | None = None
    """The most bytes of a day, of all devices together, both ways. See [Bytes of a
    day](/devices/network.md#bytes-of-a-day).
    """
    device_bytes_per_day_max: ByteCount | None = None
    """The most bytes of a day for each device, both ways. Both limits must be at least twice what a device's pings
    take, 2.2 MB with the default `heartbeat_s`.
    """

    def __post_init__(self) -> None:
        if not PIECE_BYTES_MIN <= self.piece_bytes <= PIECE_BYTES_MAX:
            raise ValueError("piece_bytes must be from 64 KiB to 16 MiB")


class CodecSettings(Section, frozen=True):
    """`[codec]`: the codecs of payloads, by the names of the wire protocol.

    `push` codes updates and `model` codes whole models. `delta` codes the differences between two published
    versions. Published versions form one chain for all devices. The chain moves with every version that is made
    of several updates. If every update makes a version, the chain moves at most every `publish_s`. Without that
    setting it moves at most four times in the usual time between two exchanges of a device. A device that does
    not know a codec gets and sends `identity`.
    """

    push: str = "auto"
    """For updates: any codec, or `"auto"`. With `"auto"` the hub chooses for each device by its measured link. It
    begins with `int8`. On a slow link it takes `top_k(0.1)+int8`. A link is slow if an upload in `int8` takes over
    a tenth of the time for eight local steps and a round trip, and if it carries less than 10 MB/s. The fastest of
    the last 32 exchanges tells how fast the link is, so that a busy machine is not taken for a slow link. The hub
    returns to `int8` if that would take a twentieth, 32 exchanges in a row. Updates up to 4 KiB always travel as
    `identity`. Under `model_average`, `"auto"` is `float16`, and you may choose `identity`, `float16` or
    `bfloat16`.
    """
    model: str = "float16"
    """For the whole model, which the hub sends to a device that joins, comes back, or has missed too much:
    `identity`, `float16` or `bfloat16`. If a value does not fit, the model travels as `identity`. With `delta =
    "int8"` a device that joins later or comes back gets the whole model in `int8`, half as long, and its next
    differences correct it; [decision 0014](/decisions/0014-send-deltas-along-one-published-chain.md).
    """
    delta: str = "int8"
    """For the differences between versions, which the hub sends to all other devices: any codec but `auto`.
    `"off"`: the whole model each time.
    """
    publish_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """The shortest time between two versions that the hub gives to devices. The key holds under `immediate` and
    `model_average`, where every update is a version. Without this key the hub gives four versions in the usual
    period between two exchanges. No effect under other aggregators, or with `delta = "off"`.
    """
    error_feedback: Literal["auto", "always", "never"] = "auto"
    """Whether a device adds the part that its codec dropped (the residual) to its next update. `"auto"`: with
    `top_k` and `sign`. The residual takes one more vector on the device.
    """
    residual_decay: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Share of the residual that stays with every new version, also versions that the device missed. Less than 1
    is faster, since devices learn much of the residual again. 1 keeps all of it, and ends a little more accurate;
    0 drops it.
    """

    def __post_init__(self) -> None:
        for name in (self.push, self.model, self.delta):
            if name not in ("auto", "off"):
                check_codec_name(name)
        if self.push == "off":
            raise ValueError("push = 'off': devices must send something; for float32 write 'identity'")
        if self.model not in ELEMENTWISE:
            raise ValueError(f"model = {self.model!r}: whole models travel as one of {', '.join(ELEMENTWISE)}")
        if self.delta == "auto":
            raise ValueError("delta = 'auto': the chain is one for all devices; name a codec, or 'off'")


FLOAT32 = CodecSettings(push="identity", model="identity", delta="off")
"""No compression: four bytes a value."""


class CheckpointSettings(Section, frozen=True):
    """`[checkpoint]`: how often a hub writes its whole state, how many it keeps, and which one it resumes from.

    `every` is a number of updates, seconds, minutes or hours; while nothing changes, no checkpoint is written. The
    hub also writes one at the end, and when the journal has grown by `journal_bytes_max` and by eight models.
    """

    every: str = "1 minute"
    """How often: `"1000 updates"`, `"30 seconds"`, `"10 minutes"` or `"1 hour"`."""
    keep: Annotated[int, Meta(ge=2, le=10_000)] = 3
    """Number of checkpoints that the hub keeps, besides the best one."""
    recovery: Annotated[str, Meta(min_length=1)] = "latest"
    """Checkpoint to resume from: `latest`, `best`, or a name. `latest` also replays the journal after it. The
    others begin a new branch, and the hub refuses updates from later versions. Names stand in the folder and in
    `edgeasync runs --json`. In a file this setting goes back at every start, so rather give the flag once; it is
    refused for a folder without a checkpoint.
    """
    journal_bytes_max: ByteCount = ByteCount(256 << 20)
    """When the journal has grown by this size, and by at least eight models, the hub writes a checkpoint. It then
    drops the journal before the second newest checkpoint.
    """

    def __post_init__(self) -> None:
        parse_every(self.every)

    @property
    def every_s(self) -> float:
        """Seconds between two checkpoints; infinite if updates are counted."""
        return parse_every(self.every)[1]

    @property
    def every_updates(self) -> float:
        """Updates between two checkpoints; infinite if seconds are counted."""
        return parse_every(self.every)[0]


class EvaluationSettings(Section, frozen=True):
    """`[evaluation]`: how often the model is evaluated, and on which data; without any, by the devices' losses."""

    data: FilePath | None = None
    """File of examples that no device trains on, like `data` of an agent. The hub runs an ONNX model in evaluation
    mode (no dropout, batch norms with their running statistics). For that the hub needs the forward model, so it
    refuses a training graph that you built before.
    """
    every: str = "100 updates"
    """Applied updates, or time, between two evaluations: seconds (`s`), minutes (`min`) or hours (`h`). With a
    time the hub evaluates the first version that is made after it. While the fleet rests, the hub evaluates every
    version, but at most every 10 s. It skips an evaluation while another one runs.
    """

    def __post_init__(self) -> None:
        parse_every(self.every)


class StopPlateau(Section, frozen=True):
    """`[hub.stop.plateau]`: training is finished once evaluations have stopped improving for so long.

    An evaluation is better by its accuracy, or without held-out data by its loss. With `updates` and `minutes`,
    both must have passed.
    """

    updates: Annotated[int, Meta(ge=1)] | None = None
    """Updates applied since the last better evaluation."""
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """Minutes since the last better evaluation. While there was no hub, no time passed."""
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 0.001
    """How much better counts as better: the least rise of the accuracy, or the least share by which the loss
    falls.
    """

    def __post_init__(self) -> None:
        if self.updates is None and self.minutes is None:
            raise ValueError("plateau needs patience: give updates, minutes, or both")


class StopCondition(Section, frozen=True):
    """When training is finished. A condition that you leave out never ends it."""

    updates: Annotated[int, Meta(ge=1)] | None = None
    """End when the hub has applied this number of device updates in this run, over all its starts. A version
    usually takes several updates, so a few more may count.
    """
    minutes: Annotated[float, Meta(gt=0)] | None = None
    """End when the hub has run for this long in this run. Time without a hub does not count."""
    loss: Annotated[float, Meta(ge=0)] | None = None
    """End when an evaluation finds at most this loss; see `[evaluation]`. If there are neither held-out data nor
    losses from devices, there is no evaluation, and the hub warns.
    """
    accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None
    """End when an evaluation finds at least this share of classes right. Refused without `evaluation.data`, and
    for any loss but `cross_entropy`, since no other loss has an accuracy.
    """
    plateau: StopPlateau | None = None
    """End when evaluations stop improving; `[hub.stop.plateau]`."""


class HubCoreSettings(Section, frozen=True):
    """All settings of the hub's core. They are fixed for a run.

    With `held_out` the hub evaluates the model; a `Hub` with an evaluator sets it. Without it the loss that most
    of the devices reach takes the place of an evaluation. A `quiet` hub lets its devices rest while the model
    stands still, if its frequency is adaptive.

    `frozen` says what happens to a device whose frozen arrays differ from those of the hub's model. A `Hub` sets
    their checksum, `frozen_arrays`. Without it the hub compares all devices with the first one.
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
    """Raise `ValueError` for a limit of a day's bytes that a device's pings would use up."""
    pings_bytes = round(DAY_S / liveness.heartbeat_s) * HEARTBEAT_BYTES
    for name in ("bytes_per_day_max", "device_bytes_per_day_max"):
        most = getattr(limits, name)
        if most is not None and most < 2 * pings_bytes:
            raise ValueError(
                f"limits.{name} is {most} bytes, and a device's pings alone take {pings_bytes} a day: give at "
                f"least {2 * pings_bytes}, or a longer liveness.heartbeat_s"
            )
