"""The model as it is sent to devices: the whole published version, or the differences that lead to it.

All devices follow one published chain, so the hub keeps no copy of the model for each device. The published model
p moves by the coded difference w - p; the next difference contains what the codec dropped from this one. Every sum
is rounded to values that the model's codec can represent. So a device that receives the whole model holds the same
bits as a device that applied the differences. A few devices hold a coarse model instead (`off_chain_models.py`).
"""

import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN, BufferPool
from edgeasync.core.arrays.delta_chain import Difference, follow, is_finite
from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.arrays.off_chain_models import Coarse, OffChainModel, OffChainModels
from edgeasync.core.arrays.state_codec import Array, take_payload, take_values
from edgeasync.core.hub.codec_agreement import COARSE
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import ELEMENTWISE, VectorSource, make_codec
from edgeasync.protocol.messages import DELTAS_MAX, Deltas

_Living = weakref.WeakValueDictionary[int, npt.NDArray[Any]]
"""Arrays, by `id`, that something still refers to."""


class PublishedPayload(msgspec.Struct, frozen=True, gc=False):
    """A payload for one device, its checksum and codec; with `deltas` it holds differences from a version."""

    payload: wire.Buffer
    checksum: int
    codec: str
    deltas: Deltas | None = None


class PublisherState(msgspec.Struct):
    """The durable fields of `Publisher`; its vectors and payloads are arrays.

    `steps` are the versions that the chain's steps begin at. `codec` codes whole models: it is the codec that was
    set, or `identity` once the model had values too large for that one.
    """

    number: int
    codec: str
    checksum: int
    steps: list[int]


class MadeOffers(msgspec.Struct):
    """Payloads coded from one published version, for all devices or for one; dropped with that version.

    `differences` are by the version that they begin at, and `joined` holds those of the chain in one buffer.
    `led_on` has what single devices are sent beside the chain, `coarse` the coarse whole model, if it will do.
    """

    differences: dict[int, PublishedPayload] = {}
    joined: memoryview | None = None
    led_on: dict[Hashable, tuple[OffChainModel, tuple[PublishedPayload, Coarse]]] = {}
    coarse: tuple[PublishedPayload, Coarse] | None = None
    is_coarse_made: bool = False


class SentPayloads:
    """The large payloads that are still being sent: their arrays are counted until nothing refers to them.

    Views and slices of an array are counted with it; `bytes` cannot be tracked, and are not counted.
    """

    def __init__(self) -> None:
        self._current: _Living = weakref.WeakValueDictionary()
        self._outdated: _Living = weakref.WeakValueDictionary()

    @property
    def outdated(self) -> int:
        """How many are those of an earlier publication."""
        return len(self._outdated)

    def watch(self, payload: wire.Buffer, *, outdated: bool = False) -> None:
        """Count a payload of what is published now, or of what was."""
        if isinstance(payload, memoryview) and len(payload) >= POOLED_BYTES_MIN:
            array = payload.obj
            assert isinstance(array, np.ndarray)
            among = self._outdated if outdated else self._current
            among[id(array)] = array

    def outdate(self) -> None:
        """Count all that is still being sent as that of an earlier publication."""
        if self._current:
            self._outdated.update(self._current)
            self._current.clear()


class Publisher:
    """The published model and the last steps of its chain, as long as they take fewer bytes than the whole model.

    Without a codec for differences there is no chain, and every device receives the newest model, whole.
    """

    def __init__(self, spec: ParameterSpec, model: HubModel, settings: CodecSettings) -> None:
        self._spec = spec
        self._model = model
        self._codec = make_codec(settings.model, spec)
        self._delta = None if settings.delta == "off" else make_codec(settings.delta, spec)
        self._published: Snapshot | None = None  # stays None without a chain, to keep no old version alive
        self._checksum = 0
        self._steps: deque[tuple[int, wire.Buffer]] = deque()
        self._checksums: dict[int, int] = {}  # of the chain's versions; not of those before the last start
        self._off_chain = OffChainModels(spec)
        self._fitting = (-1, "", False)
        self._made = MadeOffers()
        self._offered = -1  # the number of the version offered last, without a chain
        self._pool = BufferPool(spec.nbytes)
        self._sent = SentPayloads()
        if self._delta is not None:
            self.publish()

    @property
    def published(self) -> Snapshot:
        """The version that a device is sent now."""
        return self._published or self._model.current

    @property
    def outdated_alive(self) -> int:
        """How many payloads of earlier publications, of 64 KiB or more, are still being sent."""
        return max(0, self._pool.in_use - 1) + self._sent.outdated

    def publish(self, *, whole: bool = False) -> None:
        """Move the published model to the current version; with `whole`, by no difference but as a whole model."""
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
            random = np.random.Generator(np.random.PCG64(current.number))
            step = self._delta.encode(Difference(current.vector, base.vector, trained), random)
            follow(base.vector, [self._delta.open(step)], self._codec, trained, vector)
            self._steps.append((base.number, step))
            self._trim_steps(self._codec.payload_bytes_max)  # for older versions the whole model is as short
        if not is_finite(VectorSource(vector)) and is_finite(VectorSource(current.vector)):
            # The model has values too large for its codec (float16 ends at 65,504): send float32 from now on.
            self._codec = make_codec("identity", self._spec)
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
        """Return the payload for a device that holds the version `base`, if any; `codec` codes a whole model.

        `held` is the checksum of what the device holds, if it says that. With `coarse` the `owner` may be sent a
        coarse whole model, and be led on from there.
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
            fits = codec == self._codec.name  # any other codec but identity would round the published values
        else:
            fits = self._fits(published, codec)
            if self._offered != published.number:
                self._offered = published.number
                self._sent.outdate()
        used = make_codec(codec if fits else "identity", self._spec)
        payload, checksum = published.payload(used)
        if used.name != "identity":  # whose payload is a view of the vector itself
            self._sent.watch(payload)
        return PublishedPayload(payload, checksum, used.name)

    def code(self, snapshot: Snapshot, codec: str) -> None:
        """Code a version before a device asks for it; any thread may do this."""
        used = codec if self._fits(snapshot, codec) else "identity"
        snapshot.payload(make_codec(used, self._spec))

    def _fits(self, snapshot: Snapshot, codec: str) -> bool:
        """Return whether a codec can represent a version (float16 ends at 65,504), by coding it."""
        if codec == "identity":
            return True
        if self._fitting[:2] != (snapshot.number, codec):
            used = make_codec(codec, self._spec)
            finite = is_finite(used.open(snapshot.payload(used)[0]))
            self._fitting = (snapshot.number, codec, finite)
        return self._fitting[2]

    def dump_state(self) -> tuple[PublisherState | None, dict[str, Array]]:
        """Return the durable state and arrays, which never change; without a chain there are neither."""
        if self._published is None:
            return None, {}
        arrays: dict[str, Array] = {"published": self._published.vector}
        arrays |= {f"chain/{number}": np.frombuffer(payload, np.uint8) for number, payload in self._steps}
        numbers = [number for number, _ in self._steps]
        return PublisherState(self._published.number, self._codec.name, self._checksum, numbers), arrays

    def load_state(self, state: PublisherState | None, arrays: Mapping[str, Array]) -> None:
        """Load a durable state; its arrays are copied. Raises `StorageError` if one is missing."""
        if (state is None) != (self._delta is None) or (state and state.codec not in ELEMENTWISE):
            raise StorageError("the hub's state was written under other [codec] settings; resume it under those")
        if state is None:
            return
        values = take_values(arrays, "published", (self._spec.length,))
        steps = [(number, take_payload(arrays, f"chain/{number}")) for number in state.steps]
        self._withdraw_offers()
        vector = self._pool.take_vector()
        vector[:] = values
        self._published = Snapshot(state.number, vector)
        self._codec = make_codec(state.codec, self._spec)
        self._checksum = state.checksum
        self._steps = deque(steps)
        self._checksums = {state.number: state.checksum}
        self._off_chain.clear()

    def needs_coding(self, base: int | None, held: int | None, owner: Hashable, *, coarse: bool) -> bool:
        """Return whether the offer for a device has yet to be coded, for this device or for all like it."""
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
        """Code the offer for a device whose offer `needs_coding`; runs in the background."""
        off_chain = self._off_chain.find(owner, base, held)
        if off_chain is None:
            self._make_coarse(self.published)
        elif off_chain.number != self.published.number:
            self._lead_on(owner, off_chain)

    def _may_be_off_chain(self, owner: Hashable, off_chain: OffChainModel | None) -> bool:
        """Return whether a device may hold another model than the chain's: not at the beginning."""
        return bool(self._steps) and self._off_chain.may_hold(owner, off_chain)

    def _offer_off_chain(self, owner: Hashable, off_chain: OffChainModel | None) -> PublishedPayload | None:
        """Return the difference from what a device holds beside the chain, or a coarse model, if one will do."""
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
            self._off_chain.drop(owner)  # nothing was dropped
        else:
            self._off_chain.put(owner, published.number, coded, off_chain)
        return offer

    def _lead_on(self, owner: Hashable, off_chain: OffChainModel) -> tuple[PublishedPayload, Coarse] | None:
        """Return the difference for a device, which is coded once."""
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
        """Return the coarse whole model, which is coded once for all devices."""
        if not self._made.is_coarse_made:
            self._made.is_coarse_made = True
            coded = self._off_chain.code_whole(published, make_codec(COARSE, self._spec))
            if coded is not None:
                self._made.coarse = PublishedPayload(coded.payload, wire.checksum(coded.payload), COARSE), coded
        return self._made.coarse

    @property
    def _coarse_bytes(self) -> int:
        """The length of a coarse whole model."""
        return make_codec(COARSE, self._spec).payload_bytes_max

    def _deltas_from(self, base: int, held: int | None) -> PublishedPayload | None:
        """Return the steps from a version to the published one, if the chain still has them and it is held."""
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
        """Return the newest steps as one payload: all devices receive parts of one buffer."""
        if len(newest) <= 1:
            return newest[0] if newest else b""
        if self._made.joined is None:
            self._made.joined = np.concatenate([np.frombuffer(step, np.uint8) for _, step in self._steps]).data
            self._sent.watch(self._made.joined)
        return self._made.joined[-sum(len(step) for step in newest) :]

    def _trim_steps(self, nbytes: int) -> None:
        """Drop the oldest steps until those left take less than `nbytes` bytes, and one message can list them."""
        total = sum(len(step) for _, step in self._steps)
        while self._steps and (total >= nbytes or len(self._steps) > DELTAS_MAX):
            _, step = self._steps.popleft()
            total -= len(step)
            self._sent.watch(step, outdated=True)

    def _withdraw_offers(self) -> None:
        """Drop the offers of the version published so far; its payloads still being sent are outdated now."""
        self._sent.outdate()
        self._made = MadeOffers()
