"""Coarse models that some devices have instead of the published chain's model.

A device whose version the chain's differences cannot update gets the whole model in a coarse codec.
The device's model then differs from the chain's model, and the hub stores a copy of it. The next
difference for this device starts from that copy, and so contains what the codec dropped: this is
error feedback at the hub. An update is relative to the device's own model, so the coarse error does
not reduce its quality. After some differences, the device gets the exact whole model, and then
follows the chain.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.delta_chain import Difference, follow, generator_for, is_finite
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorCodec, VectorSource, copy_range

OFF_CHAIN_MAX = 8
"""Maximum number of devices whose models are stored, with one vector for each. Other devices get
the exact whole model.
"""

DIFFERENCES_MAX = 8
"""Number of differences after which a device gets the exact whole model, and frees its slot."""

UNUSED_MAX = 64
"""A model is dropped if its device has not reported it during this number of publications."""

ERROR_MAX = 0.02
"""Maximum relative error of a coarse model. If the error is larger, the exact model is sent."""


class OffChainModel(NamedTuple):
    """The model of a device that does not follow the chain.

    `differences` counts the differences applied to it. `since` is the number of the publication at
    which it was sent.
    """

    number: int
    checksum: int
    vector: Vector
    differences: int
    since: int


class Coarse(NamedTuple):
    """An encoded whole model or difference, and the model that results from decoding it."""

    payload: wire.Buffer
    vector: Vector
    checksum: int


class OffChainModels:
    """The models of devices that do not follow the chain.

    Each model is stored for the owner of the device's transfers.
    """

    def __init__(self, spec: ParameterSpec) -> None:
        self._trained = spec.trained_length
        self._held: dict[Hashable, OffChainModel] = {}
        self._publications = 0

    def __len__(self) -> int:
        return len(self._held)

    def advance(self) -> None:
        """Count a publication, and drop models that have not been used for too long."""
        self._publications += 1
        oldest = self._publications - UNUSED_MAX
        for owner in [owner for owner, off_chain in self._held.items() if off_chain.since < oldest]:
            del self._held[owner]

    def clear(self) -> None:
        """Drop all models."""
        self._held.clear()

    def find(self, owner: Hashable, number: int | None, checksum: int | None) -> OffChainModel | None:
        """Return the model that was last sent to a device, if the device reports the same model."""
        held = self._held.get(owner)
        return held if held is not None and (held.number, held.checksum) == (number, checksum) else None

    def may_hold(self, owner: Hashable, off_chain: OffChainModel | None) -> bool:
        """Return whether a device may get a coarse model or another difference now.

        `off_chain` is the device's current model that is not part of the chain, if any.
        """
        if off_chain is None:
            return owner in self._held or len(self._held) < OFF_CHAIN_MAX
        return off_chain.differences < DIFFERENCES_MAX

    def put(self, owner: Hashable, number: int, sent: Coarse, before: OffChainModel | None) -> None:
        """Store the model that is sent to a device, and drop the previous one."""
        differences = 0 if before is None else before.differences + 1
        self._held[owner] = OffChainModel(number, sent.checksum, sent.vector, differences, self._publications)

    def drop(self, owner: Hashable) -> None:
        """Drop the model of a device, because the chain's model is sent to it."""
        self._held.pop(owner, None)

    def code_whole(self, published: Snapshot, codec: VectorCodec) -> Coarse | None:
        """Encode the whole model in a coarse codec; return `None` if the error is too large."""
        model = VectorSource(published.vector)
        payload = codec.encode(model)
        coded = codec.open(payload)
        error = norm_of(coded, self._trained, published.vector)  # NaN if any value is not finite
        if not error <= ERROR_MAX * norm_of(model, self._trained):
            return None
        vector = np.empty_like(published.vector)
        copy_range(vector, coded)
        return Coarse(payload, vector, wire.checksum(vector.data.cast("B")))

    def lead_on(
        self, off_chain: OffChainModel, published: Snapshot, delta: VectorCodec, rounding: VectorCodec
    ) -> Coarse | None:
        """Encode the difference from a device's model to the published model.

        Return `None` if the result is not finite.
        """
        difference = Difference(published.vector, off_chain.vector, self._trained)
        payload = delta.encode(difference, generator_for(delta, published.number))
        vector = np.empty_like(off_chain.vector)
        follow(off_chain.vector, [delta.open(payload)], rounding, self._trained, vector)
        if not is_finite(VectorSource(vector)):
            return None
        return Coarse(payload, vector, wire.checksum(vector.data.cast("B")))
