"""What devices are given of the model: the newest version, or what leads to it from the version they hold.

There is one published chain for all devices, so the hub keeps no copy for any of them. The published model p
moves by the coded difference w - p; what the coding drops is part of the next difference. Every sum is rounded to
what the model's codec can carry, so whoever is given the whole model, and whoever followed the differences, hold
the same bits.
"""

from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np

from edgeasync.core.arrays.buffers import BufferPool, Living
from edgeasync.core.arrays.delta_chain import Difference, follow, is_finite
from edgeasync.core.arrays.hub_model import POOLED_BYTES_MIN, Model, Snapshot
from edgeasync.core.arrays.state_codec import Array, take_payload, take_values
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.errors import StorageError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import ELEMENTWISE, VectorSource, make_codec
from edgeasync.protocol.messages import DELTAS_MAX, Deltas


class Offer(msgspec.Struct, frozen=True, gc=False):
    """A payload for one device, its checksum and codec; with `deltas` it leads on from what the device holds."""

    payload: wire.Buffer
    checksum: int
    codec: str
    deltas: Deltas | None = None


class PublisherState(msgspec.Struct):
    """What is durable of `Publisher`, beside its arrays.

    `steps` are the versions that the chain's steps lead from; `codec` is that of whole models, which is no longer
    the one set where the model has outgrown it.
    """

    number: int
    codec: str
    checksum: int
    steps: list[int]


class Publisher:
    """The published model and the last steps of its chain, as many as cost less than the whole model.

    Without a codec for differences what is published is the model itself, whole for everyone.
    """

    def __init__(self, spec: ParameterSpec, model: Model, settings: CodecSettings) -> None:
        self._model = model
        self._published: Snapshot | None = None  # without a chain it would keep the first version alive
        self._spec = spec
        self._codec = make_codec(settings.model, spec)
        self._delta = None if settings.delta == "off" else make_codec(settings.delta, spec)
        self._pool = BufferPool(spec.nbytes)
        self._steps: deque[tuple[int, wire.Buffer]] = deque()
        self._offers: dict[int, Offer] = {}
        self._joined: memoryview | None = None
        self._coded = Living()
        self._own = 0
        self._fitting = (-1, "", False)
        self._checksum = 0
        if self._delta is not None:
            self.publish()

    @property
    def published(self) -> Snapshot:
        """What a device that asks is given now."""
        return self._published or self._model.current

    @property
    def outdated_alive(self) -> int:
        """Payloads of earlier publications, of 64 KiB or more, that are still being sent."""
        return max(0, self._pool.in_use - 1) + max(0, len(self._coded) - self._own)

    def publish(self, *, anew: bool = False) -> None:
        """Move the published model to where the model is; `anew` breaks the chain: everyone is given it whole."""
        assert self._delta is not None
        current, held = self._model.current, self._published
        trained = self._spec.trained_length
        target = self._empty_vector()
        if anew or held is None:
            target[:] = current.vector
            for start in range(0, trained, CHUNK):
                self._codec.round_in_place(target[start : min(start + CHUNK, trained)])
            self._steps.clear()
        else:
            random = np.random.Generator(np.random.PCG64(current.number))
            step = self._delta.encode(Difference(current.vector, held.vector, trained), random)
            follow(held.vector, [self._delta.open(step)], self._codec, trained, target)
            self._steps.append((held.number, step))
            self._watch(step)
            self._forget_old_steps()
        if not is_finite(VectorSource(target)) and is_finite(VectorSource(current.vector)):
            # The model has outgrown its codec (float16 ends at 65,504): from now on it travels as it is.
            self._codec = make_codec("identity", self._spec)
            self._steps.clear()
            target[:] = current.vector
        self._offers.clear()
        self._joined = None
        self._checksum = wire.checksum(target.data.cast("B"))
        self._published = Snapshot(current.number, target)
        self._count_own()

    def offer(self, held: int | None, codec: str) -> Offer:
        """Return what a device is sent that holds the version `held`, or none; `codec` is for the whole model."""
        found = None if held is None else self._lead_on(held)
        if found is not None:
            return found
        published = self.published
        if self._delta is not None:
            fits = codec == self._codec.name  # what is published is on its grid; no other is exact but identity
        else:
            fits = codec == "identity" or self.fits(published, codec)
        used = make_codec(codec if fits else "identity", self._spec)
        payload, checksum = published.payload(used)
        if used.name != "identity":  # that is a view of the vector itself
            self._watch(payload)
        return Offer(payload, checksum, used.name)

    def fits(self, snapshot: Snapshot, codec: str) -> bool:
        """Whether a version can travel by a codec: float16 ends at 65,504. It is coded for that, if it was not."""
        if self._fitting[:2] != (snapshot.number, codec):
            used = make_codec(codec, self._spec)
            finite = is_finite(used.open(snapshot.payload(used)[0]))
            self._fitting = (snapshot.number, codec, finite)
        return self._fitting[2]

    def dump_state(self) -> tuple[PublisherState | None, dict[str, Array]]:
        """Return the durable state, and arrays that never change; none without a chain."""
        if self._published is None:
            return None, {}
        arrays: dict[str, Array] = {"published": self._published.vector}
        arrays |= {f"chain/{number}": np.frombuffer(payload, np.uint8) for number, payload in self._steps}
        numbers = [number for number, _ in self._steps]
        return PublisherState(self._published.number, self._codec.name, self._checksum, numbers), arrays

    def load_state(self, state: PublisherState | None, arrays: Mapping[str, Array]) -> None:
        """Go on from a durable state, whose arrays are copied; raises `StorageError` if any is not there."""
        if (state is None) != (self._delta is None) or (state and state.codec not in ELEMENTWISE):
            raise StorageError("the hub's state was written under other [codec] settings; go on with those")
        if state is None:
            return
        values = take_values(arrays, "published", (self._spec.length,))
        steps = [(number, take_payload(arrays, f"chain/{number}")) for number in state.steps]
        vector = self._empty_vector()
        vector[:] = values
        self._published = Snapshot(state.number, vector)
        self._codec = make_codec(state.codec, self._spec)
        self._checksum = state.checksum
        self._steps = deque(steps)
        self._offers.clear()
        self._joined = None
        for _, step in steps:
            self._watch(step)
        self._count_own()

    def _lead_on(self, held: int) -> Offer | None:
        """Return the steps that lead on from a version, if they are still there."""
        if self._delta is None:
            return None
        if held not in self._offers:
            if held != self.published.number and all(number != held for number, _ in self._steps):
                return None
            lengths = tuple([len(payload) for number, payload in self._steps if number >= held])
            payload = self._newest_bytes(sum(lengths), len(lengths))
            deltas = Deltas(held, lengths, self._checksum, self._codec.name)
            self._offers[held] = Offer(payload, wire.checksum(payload), self._delta.name, deltas)
        return self._offers[held]

    def _newest_bytes(self, nbytes: int, count: int) -> wire.Buffer:
        """Return the last `count` steps, of so many bytes, in one: all devices get parts of one buffer."""
        if count <= 1:
            return self._steps[-1][1] if count else b""
        if self._joined is None:
            self._joined = np.concatenate([np.frombuffer(payload, np.uint8) for _, payload in self._steps]).data
            self._watch(self._joined)
        return self._joined[-nbytes:]

    def _watch(self, payload: wire.Buffer) -> None:
        """Count a payload as long as something refers to it."""
        if len(payload) >= POOLED_BYTES_MIN and payload not in self._coded:
            self._coded.watch(payload)
            self._count_own()

    def _count_own(self) -> None:
        """Count the payloads that are not outdated: those of the published model, and the steps of the chain."""
        whole = [payload for payload, _ in self.published.payloads]
        joined = [] if self._joined is None else [self._joined]
        own = [*whole, *joined, *[step for _, step in self._steps]]
        self._own = sum(payload in self._coded for payload in own)

    def _forget_old_steps(self) -> None:
        """Keep only steps from which it is cheaper to lead on than to begin anew."""
        total = sum(len(payload) for _, payload in self._steps)
        while self._steps and (total >= self._codec.payload_bytes_max or len(self._steps) > DELTAS_MAX):
            total -= len(self._steps.popleft()[1])

    def _empty_vector(self) -> Vector:
        if self._spec.nbytes < POOLED_BYTES_MIN:
            return np.empty(self._spec.length, np.float32)
        return self._pool.take().view(np.float32)
