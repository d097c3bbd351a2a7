"""Models that devices hold beside the published chain: coarse whole models, and what led on from there.

A device whose model the chain does not lead on from is sent the whole model in a coarse codec. So it holds another
model than the chain's, and the hub remembers which. The next difference for this device starts from there, and so
contains what the coding dropped: error feedback at the hub. An update is relative to what its device holds, and so
is as good as any. Who stays is sent the whole model exactly after a while, which the chain leads on from.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.delta_chain import Difference, follow, is_finite
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorCodec, VectorSource, copy_range

OFF_CHAIN_MAX = 8
"""How many devices' models are remembered, each a vector. Any further device is sent the whole model exactly."""

DIFFERENCES_MAX = 8
"""After this many differences a device is sent the whole model exactly, and makes room for another device."""

UNUSED_MAX = 64
"""After this many publications a model that no device has named is forgotten."""

ERROR_MAX = 0.02
"""The coarse model may be this far from the model, in its own length; else the model is sent exactly."""


class OffChainModel(NamedTuple):
    """What a device holds beside the chain: a version, after how many differences, since which publication."""

    number: int
    checksum: int
    vector: Vector
    differences: int
    since: int


class Coarse(NamedTuple):
    """A whole model or a difference as it is sent, and the model that it leads to."""

    payload: wire.Buffer
    vector: Vector
    checksum: int


class OffChainModels:
    """What some devices hold, by the transfers' owner."""

    def __init__(self, spec: ParameterSpec) -> None:
        self._trained = spec.trained_length
        self._held: dict[Hashable, OffChainModel] = {}
        self._publications = 0

    def __len__(self) -> int:
        return len(self._held)

    def advance(self) -> None:
        """Count a publication, and forget what no device has named for long."""
        self._publications += 1
        oldest = self._publications - UNUSED_MAX
        for owner in [owner for owner, off_chain in self._held.items() if off_chain.since < oldest]:
            del self._held[owner]

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()

    def find(self, owner: Hashable, number: int | None, checksum: int | None) -> OffChainModel | None:
        """Return what a device was sent last, if that is what it says it holds."""
        held = self._held.get(owner)
        return held if held is not None and (held.number, held.checksum) == (number, checksum) else None

    def may_hold(self, owner: Hashable, off_chain: OffChainModel | None) -> bool:
        """Return whether a device may be sent a model beside the chain now; `off_chain` is what it holds there."""
        if off_chain is None:
            return owner in self._held or len(self._held) < OFF_CHAIN_MAX
        return off_chain.differences < DIFFERENCES_MAX

    def put(self, owner: Hashable, number: int, sent: Coarse, before: OffChainModel | None) -> None:
        """Remember what a device is sent, in place of what it held."""
        differences = 0 if before is None else before.differences + 1
        self._held[owner] = OffChainModel(number, sent.checksum, sent.vector, differences, self._publications)

    def drop(self, owner: Hashable) -> None:
        """Forget a device: what it is sent is the chain's."""
        self._held.pop(owner, None)

    def code_whole(self, published: Snapshot, codec: VectorCodec) -> Coarse | None:
        """Return the whole model in a coarse codec, `None` if that changes it too much."""
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
        """Return the difference from what a device holds to the published model; `None` if it is not finite."""
        random = np.random.Generator(np.random.PCG64(published.number))
        payload = delta.encode(Difference(published.vector, off_chain.vector, self._trained), random)
        vector = np.empty_like(off_chain.vector)
        follow(off_chain.vector, [delta.open(payload)], rounding, self._trained, vector)
        if not is_finite(VectorSource(vector)):
            return None
        return Coarse(payload, vector, wire.checksum(vector.data.cast("B")))
