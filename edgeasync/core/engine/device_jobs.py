"""A device's background jobs on models, which run one at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from edgeasync.core.arrays.delta_chain import is_finite
from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.device import events
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import Source, VectorCodec
from edgeasync.protocol.messages import Assignment, Deltas, Welcome


class CodedUpdate(NamedTuple):
    """An update's payload, and the codec that encoded it."""

    codec: VectorCodec
    payload: wire.Buffer
    checksum: int


def install_model(
    model: DeviceModel, assignment: Assignment, payload: wire.Buffer, welcome: Welcome
) -> events.DeviceEvent:
    """Decode the payload of an assignment into the device's model."""
    deltas, before = assignment.deltas, model.version
    model.version = None
    try:
        if deltas is None:
            model.install(model.codecs.make(assignment.codec).open(payload))
        elif before == assignment.version:  # the device has this version already, but the hub does not know
            model.install_deltas((), model.codecs.make(deltas.rounding), deltas.checksum)
        elif before is None or before.number != deltas.base:  # the lineage may be new; the checksum decides
            model.version = before
            return events.InstallFailed(
                "the hub's differences start from a version that this device lacks; fetching again"
            )
        else:
            rounding = model.codecs.make(deltas.rounding)
            codec = model.codecs.make(assignment.codec)
            model.install_deltas(_open_deltas(deltas, payload, codec), rounding, deltas.checksum)
    except ProtocolError as error:
        return events.InstallFailed(f"the hub's model is invalid: {error}", spoilt=True)
    model.version = assignment.version
    if before is not None and before.lineage == assignment.version.lineage:
        model.decay_residual(welcome.residual_decay ** max(0, assignment.version.number - before.number))
    return events.ModelInstalled(assignment, model.checksum)


def code_update(
    model: DeviceModel, welcome: Welcome, push_codec: str, random: np.random.Generator, *, overlap: bool
) -> CodedUpdate:
    """Encode the trained update as the hub requests.

    If `overlap` is set, training may continue immediately.
    """
    try:
        codec = model.codecs.make(push_codec)
    except ValueError:  # a hub should request only supported codecs; every hub accepts float32
        codec = model.codecs.make("identity")
    # With `auto`, a codec without feedback still transmits the residual of an earlier codec.
    auto = True if codec.needs_feedback else None
    feedback = {"always": True, "never": False}.get(welcome.error_feedback, auto)
    payload = model.encode_update(codec, welcome.update, feedback=feedback, overlap=overlap, random=random)
    if welcome.update == "model" and codec.name != "identity" and not is_finite(codec.open(payload)):
        codec = model.codecs.make("identity")  # a finite model may be too large for float16
        payload = model.encode_update(codec, welcome.update, overlap=overlap)
    return CodedUpdate(codec, payload, wire.checksum(payload))


def _open_deltas(deltas: Deltas, payload: wire.Buffer, codec: VectorCodec) -> Iterator[Source]:
    """Yield the differences in a payload; open each one only when it is needed."""
    start = 0
    for length in deltas.lengths:
        yield codec.open(memoryview(payload)[start : start + length])
        start += length
