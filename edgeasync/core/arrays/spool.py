"""The state that a device may save to disk to limit the loss from a power cut."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from edgeasync.core.device.pending_push import ModelKey
from edgeasync.parameters import Vector
from edgeasync.protocol import wire
from edgeasync.protocol.messages import ModelVersion, Push

TrainerState = Mapping[str, npt.NDArray[Any]]
"""A trainer's own arrays by name, such as the optimizer's vectors and the position in the data."""


class Spool(msgspec.Struct, frozen=True):
    """An update as it was first sent, and the state from which training resumes after it.

    It does not contain parameters. The device gets them with the next assignment, or from a
    `HeldModel` and differences. So after a restart, a device cannot undo the effect of a rejected
    update on the residual, and drops the residual instead.
    """

    model: ModelKey
    push: Push
    payload: wire.Buffer
    residual: Vector | None
    trainer: TrainerState = {}


class HeldModel(msgspec.Struct, frozen=True):
    """The device's copy of a version of the hub's model, to which differences are applied."""

    model: ModelKey
    version: ModelVersion
    checksum: int
    values: Vector
