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
    lease_s: Annotated[float, Meta(gt=0, le=86400)] = 15.0
    progress_s: Annotated[float, Meta(gt=0)] = 300.0

    def __post_init__(self) -> None:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(f"lease_s ({self.lease_s:g}) must be longer than heartbeat_s ({self.heartbeat_s:g})")


class Limits(Section, frozen=True):
    """The most that a hub accepts. Above a limit it tells a device when to try again."""

    devices_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] = PARAMETERS_MAX
    piece_bytes: ByteCount = ByteCount(1 << 20)
    updates_held_max: Annotated[int, Meta(ge=1)] = 64
    snapshots_max: Annotated[int, Meta(ge=2)] = 32
    strikes_max: Annotated[int, Meta(ge=1)] = 20
    quarantine_s: Annotated[float, Meta(ge=0)] = 300.0
    retry_after_s: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] = 0.5
    connections_per_key_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    bytes_per_day_max: ByteCount | None = None
    device_bytes_per_day_max: ByteCount | None = None

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
    model: str = "float16"
    delta: str = "int8"
    publish_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    error_feedback: Literal["auto", "always", "never"] = "auto"
    residual_decay: Annotated[float, Meta(ge=0, le=1)] = 0.9

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
    keep: Annotated[int, Meta(ge=2, le=10_000)] = 3
    recovery: Annotated[str, Meta(min_length=1)] = "latest"
    journal_bytes_max: ByteCount = ByteCount(256 << 20)

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
    every: str = "100 updates"

    def __post_init__(self) -> None:
        parse_every(self.every)


class StopPlateau(Section, frozen=True):
    """`[hub.stop.plateau]`: training is finished once evaluations have stopped improving for so long.

    An evaluation is better by its accuracy, or without held-out data by its loss. With `updates` and `minutes`,
    both must have passed.
    """

    updates: Annotated[int, Meta(ge=1)] | None = None
    minutes: Annotated[float, Meta(gt=0)] | None = None
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 0.001

    def __post_init__(self) -> None:
        if self.updates is None and self.minutes is None:
            raise ValueError("plateau needs patience: give updates, minutes, or both")


class StopCondition(Section, frozen=True):
    """When training is finished. A condition that you leave out never ends it."""

    updates: Annotated[int, Meta(ge=1)] | None = None
    minutes: Annotated[float, Meta(gt=0)] | None = None
    loss: Annotated[float, Meta(ge=0)] | None = None
    accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None
    plateau: StopPlateau | None = None


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
        pings_bytes = round(DAY_S / self.liveness.heartbeat_s) * HEARTBEAT_BYTES
        for name in ("bytes_per_day_max", "device_bytes_per_day_max"):
            most = getattr(self.limits, name)
            if most is not None and most < 2 * pings_bytes:
                raise ValueError(
                    f"limits.{name} is {most} bytes, and a device's pings alone take {pings_bytes} a day: "
                    "raise it, or liveness.heartbeat_s"
                )
