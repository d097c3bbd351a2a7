"""The hub's model: payloads that wait, the fold that makes the next version, and immutable snapshots.

A fold is elementwise multiply and add in cache-sized chunks, written into a buffer that becomes the next
snapshot. No BLAS there: a fused multiply-add rounds differently from machine to machine; a replay must not.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from edgeasync.core.buffers import BufferPool
from edgeasync.core.effects import Fold
from edgeasync.core.mixing import Mixer, Term, norm_of, square_sum_of
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.policy import Judgement
from edgeasync.policies.transforms import apply_chain, leading_factor, state_vectors
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import Codec, Source, VectorSource

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

    @property
    def payloads(self) -> Iterable[tuple[wire.Buffer, int]]:
        """What was coded of it so far."""
        return self._payloads.values()

    def payload(self, codec: Codec) -> tuple[wire.Buffer, int]:
        """Return the coded model and its checksum."""
        coded = self._payloads.get(codec.name)
        if coded is None:
            payload = codec.encode(VectorSource(self.vector))
            coded = self._payloads[codec.name] = (payload, wire.checksum(payload))
        return coded


class Model:
    """The newest snapshot, older ones that are kept, the optimizer's state, and the updates that wait, by handle.

    `fold` may run in another thread than the rest, one fold at a time.
    """

    def __init__(self, spec: ParameterSpec, initial: Vector, number: int, judgement: Judgement) -> None:
        spec.check(initial)
        self.spec = spec
        self.optimizer = tuple(judgement.optimizer)
        self._takes_models = judgement.aggregate.update == "model"
        self._state = [np.zeros(spec.trained_length, np.float32) for _ in range(state_vectors(self.optimizer))]
        self._updates: dict[int, Source] = {}
        self._handles = itertools.count()
        self._pool = BufferPool(spec.nbytes)
        self._mixer = Mixer(judgement, spec)
        vector = self._empty_vector()
        vector[:] = initial
        self.current = Snapshot(number, vector)
        self._kept = self._kept_last = self.current if judgement.monitor.rolls_back else None
        versions = 0 if judgement.compensation is None else judgement.compensation.versions
        self._history: deque[Snapshot] = deque([self.current][:versions], maxlen=versions)

    @property
    def snapshots_alive(self) -> int:
        """Snapshots that something still holds: the current one, and those being sent; not those kept here."""
        if not self._pool.in_use:
            return 0  # small vectors are not counted
        kept = {id(snapshot.vector) for snapshot in (*self._history, self._kept, self._kept_last) if snapshot}
        return max(0, self._pool.in_use - len(kept - {id(self.current.vector)}))

    @property
    def updates_waiting(self) -> int:
        """Payloads held for a later fold."""
        return len(self._updates)

    def keep(self, update: Source) -> int:
        """Hold an update; return its handle."""
        handle = next(self._handles)
        self._updates[handle] = update
        return handle

    def release(self, handle: int) -> Source:
        """Hand out an update that was held."""
        return self._updates.pop(handle)

    def norm(self, update: Source) -> float:
        """Return the norm of what an update adds to the trained values; not finite if any of its values is not."""
        origin = self.current.vector if self._takes_models else None
        return norm_of(update, self.spec.trained_length, origin)

    def keep_current(self) -> None:
        """Keep the current version to return to, behind the one that was kept before."""
        self._kept, self._kept_last = self._kept_last, self.current

    def restore(self, number: int) -> Snapshot:
        """Return the older of the two versions kept, under a new number; the optimizer begins anew."""
        for vector in self._state:
            vector.fill(0.0)
        if self._kept is None:
            raise ValueError("no version was kept to return to")
        self._kept_last = self._kept
        return Snapshot(number, self._kept.vector)

    def fold(self, fold: Fold, updates: Sequence[Source]) -> tuple[Snapshot, float]:
        """Compute the next version from the current one; the caller makes it current with `advance`.

        Returns also the norm of the weighted sum of the updates, if the fold is to `measure` it, or else 0; it is
        NaN where nothing is left of the sum, because the learning rate is 0.
        """
        if fold.number != self.current.number + 1:
            raise ValueError(f"fold {fold.number} does not follow version {self.current.number}")
        current, target = self.current.vector, self._empty_vector()
        trained, length = self.spec.trained_length, self.spec.length
        factor, used = leading_factor(self.optimizer, fold.plan)
        rest, plan = self.optimizer[used:], fold.plan[used:]
        if not rest:
            factor *= fold.scale
        # The pseudo-gradient of a delta is minus the delta.
        scales = [-weight * factor for weight in fold.weights]
        terms = self._terms(fold, updates, scales)
        square_sum = 0.0
        for start in range(0, trained, CHUNK):
            stop = min(start + CHUNK, trained)
            step = self._mixer.mix(terms, current, slice(start, stop), target)
            if fold.measure:
                square_sum += square_sum_of(step)
            if rest:
                apply_chain(rest, step, current[start:stop], [vector[start:stop] for vector in self._state], plan)
                if fold.scale != 1.0:
                    np.multiply(step, np.float32(fold.scale), out=step)
            np.subtract(current[start:stop], step, out=step)
        if trained < length:
            # Statistics are merged convexly, whatever the weights are, and go through no optimizer.
            share = max(1.0, sum(fold.weights))
            terms = [Term(u, -weight / share) for u, weight in zip(updates, fold.weights, strict=True)]
            for start in range(trained, length, CHUNK):
                stop = min(start + CHUNK, length)
                step = self._mixer.mix(terms, current, slice(start, stop), target)
                np.subtract(current[start:stop], step, out=step)
        return Snapshot(fold.number, target), math.sqrt(square_sum) / factor if factor else math.nan

    def advance(self, snapshot: Snapshot) -> None:
        """Make a folded snapshot the current one."""
        self.current = snapshot
        self._history.append(snapshot)

    def _terms(self, fold: Fold, updates: Sequence[Source], scales: Sequence[float]) -> list[Term]:
        """Return the updates with their scales and, to correct them, the versions they were learnt from."""
        kept = {snapshot.number: snapshot.vector for snapshot in self._history}
        kept.pop(self.current.number, None)
        bases = [kept.get(base) for base in fold.bases] if kept else [None] * len(updates)
        return [Term(*parts) for parts in zip(updates, scales, bases, strict=True)]

    def _empty_vector(self) -> Vector:
        """Return a vector to write to, whatever is in it."""
        if self.spec.nbytes < POOLED_BYTES_MIN:
            return np.empty(self.spec.length, np.float32)
        return self._pool.take().view(np.float32)
