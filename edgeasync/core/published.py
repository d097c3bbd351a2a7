"""What devices are given of the model: the newest version, or what leads to it from the version they hold.

There is one published chain for all devices, so the hub keeps no copy for any of them. The published model p
moves by the coded difference w - p; what the coding drops is part of the next difference. Every sum is rounded to
what the model's codec can carry, so whoever is given the whole model, and whoever followed the differences, hold
the same bits.
"""

from collections import deque

import msgspec
import numpy as np

from edgeasync.core.buffers import BufferPool
from edgeasync.core.chain import Difference, follow
from edgeasync.core.model import POOLED_BYTES_MIN, Model, Snapshot
from edgeasync.core.settings import CodecSettings
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import make_codec
from edgeasync.protocol.messages import DELTAS_MAX, Deltas


class Offer(msgspec.Struct, frozen=True, gc=False):
    """A payload for one device, its checksum and codec; with `deltas` it leads on from what the device holds."""

    payload: wire.Buffer
    checksum: int
    codec: str
    deltas: Deltas | None = None


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
        self._checksum = 0
        if self._delta is not None:
            self.publish()

    @property
    def published(self) -> Snapshot:
        """What a device that asks is given now."""
        return self._published or self._model.current

    @property
    def snapshots_alive(self) -> int:
        """Published models that something still holds, where they are not the hub's own snapshots."""
        return self._pool.in_use

    def publish(self, *, anew: bool = False) -> None:
        """Move the published model to where the model is; `anew` breaks the chain: everyone is given it whole."""
        assert self._delta is not None
        current, held = self._model.current, self._published
        trained = self._spec.trained_length
        target = self._empty_vector()
        if anew or held is None:
            target[:] = current.vector
            for start in range(0, trained, CHUNK):
                self._codec.snap(target[start : min(start + CHUNK, trained)])
            self._steps.clear()
        else:
            random = np.random.Generator(np.random.PCG64(current.number))
            step = self._delta.encode(Difference(current.vector, held.vector, trained), random)
            follow(held.vector, [self._delta.open(step)], self._codec, trained, target)
            self._steps.append((held.number, step))
            self._forget_old_steps()
        if not self._is_finite(target) and self._is_finite(current.vector):
            # The model has outgrown its codec (float16 ends at 65,504): from now on it travels as it is.
            self._codec = make_codec("identity", self._spec)
            self._steps.clear()
            target[:] = current.vector
        self._offers.clear()
        self._joined = None
        self._checksum = wire.checksum(target.data.cast("B"))
        self._published = Snapshot(current.number, target)

    def offer(self, held: int | None, codec: str) -> Offer:
        """Return what a device is sent that holds the version `held`, or none; `codec` is for the whole model."""
        found = None if held is None else self._lead_on(held)
        if found is not None:
            return found
        if self._delta is not None and codec != self._codec.name:
            codec = "identity"  # what is published is on the grid of one codec; only that one and this are exact
        payload, checksum = self.published.payload(make_codec(codec, self._spec))
        return Offer(payload, checksum, codec)

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
            self._joined = memoryview(b"".join([payload for _, payload in self._steps]))
        return self._joined[-nbytes:]

    def _forget_old_steps(self) -> None:
        """Keep only steps from which it is cheaper to lead on than to begin anew."""
        total = sum(len(payload) for _, payload in self._steps)
        while self._steps and (total >= self._codec.payload_bytes_max or len(self._steps) > DELTAS_MAX):
            total -= len(self._steps.popleft()[1])

    def _is_finite(self, vector: Vector) -> bool:
        return all(np.isfinite(vector[at : at + CHUNK]).all() for at in range(0, len(vector), CHUNK))

    def _empty_vector(self) -> Vector:
        if self._spec.nbytes < POOLED_BYTES_MIN:
            return np.empty(self._spec.length, np.float32)
        return self._pool.take().view(np.float32)
