"""The hub's model: payloads that wait, the fold that makes the next version, and immutable snapshots.

A fold is elementwise multiply and add in cache-sized chunks, written into a buffer that becomes the next
snapshot. No BLAS there: a fused multiply-add rounds differently from machine to machine; a replay must not.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from edgeasync.core.buffers import BufferPool
from edgeasync.core.effects import Fold
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.transforms import Transform, apply_chain, leading_factor, state_vectors
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import CODECS, Codec

ROW = 1 << 12
"""Values whose squares are summed in one go: few enough for float32, and for BLAS to stay on this thread."""

POOLED_BYTES_MIN = 1 << 16
"""Snapshots from this size on are sent without copying, and their buffers are used again."""


class Snapshot:
    """One version of the model; its vector never changes. Coded payloads are made once and kept."""

    __slots__ = ("_payloads", "number", "vector")

    def __init__(self, number: int, vector: Vector) -> None:
        vector.flags.writeable = False
        self.number = number
        self.vector = vector
        self._payloads: dict[str, tuple[wire.Buffer, int]] = {}

    def payload(self, codec_name: str) -> tuple[wire.Buffer, int]:
        """Return the coded model and its checksum."""
        coded = self._payloads.get(codec_name)
        if coded is None:
            payload = CODECS[codec_name].encode(self.vector)
            coded = self._payloads[codec_name] = (payload, wire.checksum(payload))
        return coded


class Update:
    """A payload that waits to be folded."""

    __slots__ = ("codec", "payload")

    def __init__(self, codec: Codec, payload: wire.Buffer) -> None:
        self.codec = codec
        self.payload = payload

    def norm(self, length: int) -> float:
        """L2 norm of the `length` values; not finite if any of them, or the sum of a row's squares, is not."""
        if length <= ROW:
            values = self.codec.read(self.payload, 0, length, np.empty(length, np.float32))
            return math.sqrt(np.vdot(values, values))  # unlike dot, vdot never warns
        with np.errstate(over="ignore", invalid="ignore"):  # what a peer sends must not warn, let alone raise
            return math.sqrt(self._square_sum(length))

    def _square_sum(self, length: int) -> float:
        square_sum = 0.0
        scratch = np.empty(min(CHUNK, length), np.float32)
        for start in range(0, length, CHUNK):
            values = self.codec.read(self.payload, start, min(start + CHUNK, length), scratch)
            whole = values.size - values.size % ROW
            rows = np.vecdot(values[:whole].reshape(-1, ROW), values[:whole].reshape(-1, ROW))
            square_sum += float(rows.sum(dtype=np.float64)) + float(np.dot(values[whole:], values[whole:]))
        return square_sum


class Model:
    """The newest snapshot, the optimizer's state, and the updates that wait, by handle.

    `fold` may run in another thread than the rest, one fold at a time.
    """

    def __init__(self, spec: ParameterSpec, initial: Vector, number: int, optimizer: Sequence[Transform]) -> None:
        spec.check(initial)
        self.spec = spec
        self.optimizer = tuple(optimizer)
        self._state = [np.zeros(spec.trained_length, np.float32) for _ in range(state_vectors(self.optimizer))]
        self._updates: dict[int, Update] = {}
        self._handles = itertools.count()
        self._pool = BufferPool(spec.nbytes)
        self._scratch = np.empty(min(CHUNK, spec.length), np.float32)
        vector = self._empty_vector()
        vector[:] = initial
        self.current = Snapshot(number, vector)

    @property
    def snapshots_alive(self) -> int:
        """Snapshots that something still holds: the current one, and those being sent."""
        return self._pool.in_use

    @property
    def updates_waiting(self) -> int:
        """Payloads held for a later fold."""
        return len(self._updates)

    def keep(self, update: Update) -> int:
        """Hold an update; return its handle."""
        handle = next(self._handles)
        self._updates[handle] = update
        return handle

    def release(self, handle: int) -> Update:
        """Hand out an update that was held."""
        return self._updates.pop(handle)

    def fold(self, fold: Fold, updates: Sequence[Update]) -> Snapshot:
        """Compute the next version from the current one; the caller makes it current with `advance`."""
        if fold.number != self.current.number + 1:
            raise ValueError(f"fold {fold.number} does not follow version {self.current.number}")
        current, target = self.current.vector, self._empty_vector()
        trained, length = self.spec.trained_length, self.spec.length
        factor, used = leading_factor(self.optimizer, fold.plan)
        rest, plan = self.optimizer[used:], fold.plan[used:]
        # The pseudo-gradient of a delta is minus the delta.
        scales = [-weight * factor for weight in fold.weights]
        for start in range(0, trained, CHUNK):
            stop = min(start + CHUNK, trained)
            step = self._weighted_sum(updates, scales, start, stop, target[start:stop])
            if rest:
                apply_chain(rest, step, current[start:stop], [vector[start:stop] for vector in self._state], plan)
            np.subtract(current[start:stop], step, out=step)
        if trained < length:
            share = max(1.0, sum(fold.weights))
            shares = [-weight / share for weight in fold.weights]
            for start in range(trained, length, CHUNK):
                stop = min(start + CHUNK, length)
                step = self._weighted_sum(updates, shares, start, stop, target[start:stop])
                np.subtract(current[start:stop], step, out=step)
        return Snapshot(fold.number, target)

    def advance(self, snapshot: Snapshot) -> None:
        """Make a folded snapshot the current one."""
        self.current = snapshot

    def _weighted_sum(
        self, updates: Sequence[Update], scales: Sequence[float], start: int, stop: int, total: Vector
    ) -> Vector:
        """Sum scale times update over a slice, in the order given, into `total`."""
        first = updates[0]
        np.multiply(first.codec.read(first.payload, start, stop, self._scratch), scales[0], out=total)
        for position in range(1, len(updates)):
            update = updates[position]
            values = update.codec.read(update.payload, start, stop, self._scratch)
            np.add(total, np.multiply(values, scales[position], out=self._scratch[: stop - start]), out=total)
        return total

    def _empty_vector(self) -> Vector:
        """Return a vector to write to, whatever is in it."""
        if self.spec.nbytes < POOLED_BYTES_MIN:
            return np.empty(self.spec.length, np.float32)
        return self._pool.take().view(np.float32)
