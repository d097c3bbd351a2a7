"""What a device may keep besides its identity, so that a power cut costs it nothing but time."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from edgeasync.core.device.pending_push import ModelKey
from edgeasync.parameters import Vector
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push

TrainerState = Mapping[str, npt.NDArray[Any]]
"""A trainer's own arrays by name: its optimizer's vectors, its place in the data."""


class Spool(msgspec.Struct, frozen=True):
    """An update as it was first sent, and what training goes on from after it.

    The hub's model and the parameters are not among it: the next assignment brings them. So a device that lost
    them cannot take back what a rejected update made of the residual, and drops the residual with it.
    """

    model: ModelKey
    push: Push
    payload: wire.Buffer
    residual: Vector | None
    trainer: TrainerState = {}
