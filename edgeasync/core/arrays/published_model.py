"""The model as sent to devices: a whole version, or the differences to it.

All devices follow one published chain, so the hub does not need a copy of the model for each
device. The published model p moves by the encoded difference w - p, where w is the hub's model. The
next difference contains what the codec dropped from this one. Every sum is rounded to values that
the model's codec can represent. So a device that receives the whole model has the same bits as a
device that applied the differences. A few devices have a coarse model instead
(`off_chain_models.py`).
"""

import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN, BufferPool
from edgeasync.core.arrays.delta_chain import Difference, follow, generator_for, is_finite
from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.arrays.off_chain_models import Coarse, OffChainModel, OffChainModels
from edgeasync.core.arrays.state_codec import Array, take_payload, take_values
from edgeasync.core.hub.codec_agreement import COARSE
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import ELEMENTWISE, VectorSource
from edgeasync.protocol.messages import DELTAS_MAX, Deltas

_Living = weakref.WeakValueDictionary[int, npt.NDArray[Any]]
"""Maps the `id` of each array to the array, as long as it is referenced elsewhere."""


class PublishedPayload(msgspec.Struct, frozen=True, gc=False):
    """A payload for one device, with its checksum and codec.

    If `deltas` is set, the payload contains differences from an earlier version.
    """

    payload: wire.Buffer
    checksum: int
    codec: str
    deltas: Deltas | None = None


class PublisherState(msgspec.Struct):
    """The durable fields of `Publisher`; its vectors and payloads are saved as arrays.

    `steps` lists the versions at which the steps of the chain start. `codec` encodes whole models.
    It is the configured codec, or `identity` if the model contained values that are too large for
    that codec.
    """

    number: int
    codec: str
    checksum: int
    steps: list[int]


class MadeOffers(msgspec.Struct):
    """Payloads encoded from one published version, which are dropped with that version.

    `differences` maps a start version to its payload. `joined` contains the steps of the chain in
    one buffer. `led_on` contains the differences for single devices that do not follow the chain.
    `coarse` is the coarse whole model, if it is precise enough.
    """

    differences: dict[int, PublishedPayload] = {}
    joined: memoryview | None = None
    led_on: dict[Hashable, tuple[OffChainModel, tuple[PublishedPayload, Coarse]]] = {}
    coarse: tuple[PublishedPayload, Coarse] | None = None
    is_coarse_made: bool = False


class SentPayloads:
    """Counts large payloads that are still being sent, for as long as they are referenced.

    A view or slice of an array counts as the array. Objects of type `bytes` do not count, because
    they cannot be tracked.
    """

    def __init__(self) -> None:
        self._current: _Living = weakref.WeakValueDictionary()
        self._outdated: _Living = weakref.WeakValueDictionary()

    @property
    def outdated(self) -> int:
        """The number of payloads from earlier publications that are still being sent."""
        return len(self._outdated)

    def watch(self, payload: wire.Buffer, *, outdated: bool = False) -> None:
        """Count a payload of the current publication or, if `outdated`, of an earlier one."""
        if isinstance(payload, memoryview) and len(payload) >= POOLED_BYTES_MIN:
            array = payload.obj
            assert isinstance(array, np.ndarray)
            among = self._outdated if outdated else self._current
            among[id(array)] = array

    def outdate(self) -> None:
        """Mark all payloads that are still being sent as outdated."""
        if self._current:
            self._outdated.update(self._current)
            self._current.clear()


class Publisher:
    """The published model and the latest steps of its chain.

    The steps together take fewer bytes than the whole model. If no codec for differences is
    configured, there is no chain, and every device gets the newest model as a whole.
    """

    def __init__(self, spec: ParameterSpec, model: HubModel, settings: CodecSettings) -> None:
        self._spec = spec
        self._model = model
        self._codec = model.codecs.make(settings.model)
        self._delta = None if settings.delta == "off" else model.codecs.make(settings.delta)
        self._published: Snapshot | None = None  # stays None without a chain, to free old versions
        self._checksum = 0
        self._steps: deque[tuple[int, wire.Buffer]] = deque()
        self._checksums: dict[int, int] = {}  # of the chain's versions since the last start
        self._off_chain = OffChainModels(spec)
        self._fitting = (-1, "", False)
        self._made = MadeOffers()
        self._offered = -1  # the version offered last, without a chain
        self._pool = BufferPool(spec.nbytes)
        self._sent = SentPayloads()
        if self._delta is not None:
            self.publish()

    @property
    def published(self) -> Snapshot:
        """The version that is sent to devices now."""
        return self._published or self._model.current

    @property
    def outdated_alive(self) -> int:
        """The number of outdated payloads of at least 64 KiB that are still being sent."""
        return max(0, self._pool.in_use - 1) + self._sent.outdated

    def publish(self, *, whole: bool = False) -> None:
        """Make the current version the published version.

        If `whole` is set, the chain starts again, without a difference from the previous version.
        """
        assert self._delta is not None
        self._withdraw_offers()
        current, base, trained = self._model.current, self._published, self._spec.trained_length
        vector = self._pool.take_vector()
        if whole or base is None:
            vector[:] = current.vector
            self._codec.round_in_place(vector[:trained])
            self._trim_steps(0)
            self._off_chain.clear()
        else:
            difference = Difference(current.vector, base.vector, trained)
            step = self._delta.encode(difference, generator_for(self._delta, current.number))
            follow(base.vector, [self._delta.open(step)], self._codec, trained, vector)
            self._steps.append((base.number, step))
            self._trim_steps(self._codec.payload_bytes_max)  # deltas from older versions save nothing
        if not is_finite(VectorSource(vector)) and is_finite(VectorSource(current.vector)):
            # The model has values too large for its codec (float16 ends at 65,504); use float32
            # from now on.
            self._codec = self._model.codecs.make("identity")
            vector[:] = current.vector
            self._trim_steps(0)
        self._checksum = wire.checksum(vector.data.cast("B"))
        self._published = Snapshot(current.number, vector)
        known = {number: self._checksums[number] for number, _ in self._steps if number in self._checksums}
        self._checksums = known | {current.number: self._checksum}
        self._off_chain.advance()

    def offer(
        self,
        base: int | None,
        codec: str,
        *,
        held: int | None = None,
        owner: Hashable = None,
        coarse: bool = False,
    ) -> PublishedPayload:
        """Return the payload for a device that has the version `base`, if any.

        `codec` encodes a whole model. `held` is the checksum that the device reports for its
        version. If `coarse` is set, the `owner` may get a coarse whole model, and later the
        differences from it.
        """
        found = None if base is None else self._deltas_from(base, held)
        if coarse and (found is None or len(found.payload) > self._coarse_bytes):
            off_chain = self._off_chain.find(owner, base, held)
            may = self._may_be_off_chain(owner, off_chain)
            if may and (offer := self._offer_off_chain(owner, off_chain)) is not None:
                return offer
        self._off_chain.drop(owner)
        if found is not None:
            return found
        published = self.published
        if self._delta is not None:
            fits = codec == self._codec.name  # any codec but this or identity would round the published values
        else:
            fits = self._fits(published, codec)
            if self._offered != published.number:
                self._offered = published.number
                self._sent.outdate()
        used = self._model.codecs.make(codec if fits else "identity")
        payload, checksum = published.payload(used)
        if used.name != "identity":  # the payload of `identity` is a view of the vector itself
            self._sent.watch(payload)
        return PublishedPayload(payload, checksum, used.name)

    def offer_newest(self, owner: Hashable) -> PublishedPayload:
        """Return the hub's newest model, unencoded, without publishing it."""
        self._off_chain.drop(owner)
        payload, checksum = self._model.current.payload(self._model.codecs.make("identity"))
        return PublishedPayload(payload, checksum, "identity")

    def code(self, snapshot: Snapshot, codec: str) -> None:
        """Encode a version before a device requests it; may run in any thread."""
        used = codec if self._fits(snapshot, codec) else "identity"
        snapshot.payload(self._model.codecs.make(used))

    def _fits(self, snapshot: Snapshot, codec: str) -> bool:
        """Return whether a codec can represent a version. This is tested by encoding the version.

        For example, the largest value in float16 is 65,504.
        """
        if codec == "identity":
            return True
        if self._fitting[:2] != (snapshot.number, codec):
            used = self._model.codecs.make(codec)
            finite = is_finite(used.open(snapshot.payload(used)[0]))
            self._fitting = (snapshot.number, codec, finite)
        return self._fitting[2]

    def dump_state(self) -> tuple[PublisherState | None, dict[str, Array]]:
        """Return the durable state and immutable arrays.

        If there is no chain, return `None` and no arrays.
        """
        if self._published is None:
            return None, {}
        arrays: dict[str, Array] = {"published": self._published.vector}
        arrays |= {f"chain/{number}": np.frombuffer(payload, np.uint8) for number, payload in self._steps}
        numbers = [number for number, _ in self._steps]
        return PublisherState(self._published.number, self._codec.name, self._checksum, numbers), arrays

    def load_state(self, state: PublisherState | None, arrays: Mapping[str, Array]) -> None:
        """Restore a durable state; raises `StorageError` if an array is missing."""
        if (state is None) != (self._delta is None) or (state and state.codec not in ELEMENTWISE):
            raise StorageError("the hub's state was written with other [codec] settings; resume it with those")
        if state is None:
            return
        values = take_values(arrays, "published", (self._spec.length,))
        steps = [(number, take_payload(arrays, f"chain/{number}")) for number in state.steps]
        self._withdraw_offers()
        vector = self._pool.take_vector()
        vector[:] = values
        self._published = Snapshot(state.number, vector)
        self._codec = self._model.codecs.make(state.codec)
        self._checksum = state.checksum
        self._steps = deque(steps)
        self._checksums = {state.number: state.checksum}
        self._off_chain.clear()

    def needs_coding(self, base: int | None, held: int | None, owner: Hashable, *, coarse: bool) -> bool:
        """Return whether the payload for a device must be encoded before it can be sent."""
        if not coarse or (base is not None and self._deltas_from(base, held) is not None):
            return False
        off_chain = self._off_chain.find(owner, base, held)
        if not self._may_be_off_chain(owner, off_chain):
            return False
        if off_chain is None:
            return not self._made.is_coarse_made
        return (
            off_chain.number != self.published.number and off_chain is not self._made.led_on.get(owner, (None,))[0]
        )

    def prepare(self, base: int | None, held: int | None, owner: Hashable) -> None:
        """Encode a payload for which `needs_coding` returns true; runs in the background."""
        off_chain = self._off_chain.find(owner, base, held)
        if off_chain is None:
            self._make_coarse(self.published)
        elif off_chain.number != self.published.number:
            self._lead_on(owner, off_chain)

    def _may_be_off_chain(self, owner: Hashable, off_chain: OffChainModel | None) -> bool:
        """Return whether a device may get a model that is not part of the chain.

        This is never the case before the chain has its first step.
        """
        return bool(self._steps) and self._off_chain.may_hold(owner, off_chain)

    def _offer_off_chain(self, owner: Hashable, off_chain: OffChainModel | None) -> PublishedPayload | None:
        """Return the difference from a device's off-chain model, or a coarse model.

        Return `None` if neither is possible.
        """
        published = self.published
        if off_chain is not None and off_chain.number == published.number:
            deltas = Deltas(off_chain.number, (), off_chain.checksum, self._codec.name)
            return self._offer_of(b"", deltas)
        made = self._make_coarse(published) if off_chain is None else self._lead_on(owner, off_chain)
        if made is None:
            return None
        offer, coded = made
        self._sent.watch(offer.payload)
        if coded.checksum == self._checksum:
            self._off_chain.drop(owner)  # the codec dropped nothing
        else:
            self._off_chain.put(owner, published.number, coded, off_chain)
        return offer

    def _lead_on(self, owner: Hashable, off_chain: OffChainModel) -> tuple[PublishedPayload, Coarse] | None:
        """Return the difference for an off-chain device. It is encoded only once."""
        assert self._delta is not None
        before, made = self._made.led_on.get(owner, (None, None))
        if before is not off_chain or made is None:
            coded = self._off_chain.lead_on(off_chain, self.published, self._delta, self._codec)
            if coded is None:
                return None
            deltas = Deltas(off_chain.number, (len(coded.payload),), coded.checksum, self._codec.name)
            made = self._offer_of(coded.payload, deltas), coded
            self._made.led_on[owner] = off_chain, made
        return made

    def _offer_of(self, payload: wire.Buffer, deltas: Deltas) -> PublishedPayload:
        assert self._delta is not None
        return PublishedPayload(payload, wire.checksum(payload), self._delta.name, deltas)

    def _make_coarse(self, published: Snapshot) -> tuple[PublishedPayload, Coarse] | None:
        """Return the coarse whole model, which is encoded once for all devices."""
        if not self._made.is_coarse_made:
            self._made.is_coarse_made = True
            coded = self._off_chain.code_whole(published, self._model.codecs.make(COARSE))
            if coded is not None:
                self._made.coarse = PublishedPayload(coded.payload, wire.checksum(coded.payload), COARSE), coded
        return self._made.coarse

    @property
    def _coarse_bytes(self) -> int:
        """The size of the coarse whole model in bytes."""
        return self._model.codecs.make(COARSE).payload_bytes_max

    def _deltas_from(self, base: int, held: int | None) -> PublishedPayload | None:
        """Return the steps from a version to the published version.

        Return `None` if the chain no longer contains them, or if the device's values differ from
        the chain's.
        """
        if self._delta is None or (held is not None and self._checksums.get(base, held) != held):
            return None
        if base in self._made.differences:
            return self._made.differences[base]
        if base != self.published.number and all(number != base for number, _ in self._steps):
            return None
        steps = [step for number, step in self._steps if number >= base]
        deltas = Deltas(base, tuple([len(step) for step in steps]), self._checksum, self._codec.name)
        offer = self._made.differences[base] = self._offer_of(self._join(steps), deltas)
        return offer

    def _join(self, newest: list[wire.Buffer]) -> wire.Buffer:
        """Return the newest steps as one payload. All devices get parts of the same buffer."""
        if len(newest) <= 1:
            return newest[0] if newest else b""
        if self._made.joined is None:
            self._made.joined = np.concatenate([np.frombuffer(step, np.uint8) for _, step in self._steps]).data
            self._sent.watch(self._made.joined)
        return self._made.joined[-sum(len(step) for step in newest) :]

    def _trim_steps(self, nbytes: int) -> None:
        """Drop the oldest steps until the rest take less than `nbytes` and fit into one message."""
        total = sum(len(step) for _, step in self._steps)
        while self._steps and (total >= nbytes or len(self._steps) > DELTAS_MAX):
            _, step = self._steps.popleft()
            total -= len(step)
            self._sent.watch(step, outdated=True)

    def _withdraw_offers(self) -> None:
        """Drop the payloads encoded from the published version.

        Those still being sent become outdated.
        """
        self._sent.outdate()
        self._made = MadeOffers()
