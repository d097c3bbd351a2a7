"""The state that a device may keep on disk, besides its identity, to lose only time in a power cut."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from edgeasync.core.device.pending_push import ModelKey
from edgeasync.parameters import Vector
from edgeasync.protocol import wire
from edgeasync.protocol.messages import ModelVersion, Push

TrainerState = Mapping[str, npt.NDArray[Any]]
"""A trainer's own arrays by name: its optimizer's vectors, its place in the data."""


class Spool(msgspec.Struct, frozen=True):
    """An update as it was first sent, and the state from which training resumes after it.

    It holds no parameters: the next assignment brings them, or a `HeldModel` and differences from there. Without
    them a device that restarted cannot undo the effect of a rejected update on the residual, so it drops the
    residual.
    """

    model: ModelKey
    push: Push
    payload: wire.Buffer
    residual: Vector | None
    trainer: TrainerState = {}


class HeldModel(msgspec.Struct, frozen=True):
    """The hub's model at a version, as the device holds it, with its checksum: what differences lead on from."""

    model: ModelKey
    version: ModelVersion
    checksum: int
    values: Vector
