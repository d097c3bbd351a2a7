"""The hub's model: buffered updates, folds and immutable snapshots.

A fold multiplies and adds elementwise in cache-sized chunks, and writes into the buffer of the next
snapshot. It does not use BLAS, because a fused multiply-add rounds differently on different
machines, and a replay must compute the same bits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import msgspec
import numpy as np

from edgeasync.core.arrays.buffers import BufferPool
from edgeasync.core.arrays.combine import Mixer, Term, norm_of
from edgeasync.core.arrays.squares import square_sum_of
from edgeasync.core.arrays.state_codec import Array, take_payload, take_values
from edgeasync.core.hub.effects import Fold
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.combining import CentredClipCombiner
from edgeasync.policies.guards import guarded
from edgeasync.policies.policy import PolicySet
from edgeasync.policies.transforms import apply_chain, leading_factor, state_vectors
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import FLOAT16, Codecs, SixteenBits, Source, VectorCodec, VectorSource, copy_range

DECODED_BYTES_MAX = 4 << 20
"""Maximum memory for decoded updates. Updates that do not fit are decoded again by their fold."""

CURRENT = ""
"""The array name of the current version."""


class Snapshot:
    """An immutable version of the model, with one cached payload for each codec."""

    __slots__ = ("_payloads", "number", "vector")

    def __init__(self, number: int, vector: Vector) -> None:
        vector.flags.writeable = False
        self.number = number
        self.vector = vector
        self._payloads: dict[str, tuple[wire.Buffer, int]] = {}

    @property
    def payloads(self) -> Iterable[tuple[wire.Buffer, int]]:
        """The payloads encoded so far, each with its checksum."""
        return self._payloads.values()

    def payload(self, codec: VectorCodec) -> tuple[wire.Buffer, int]:
        """Return the encoded model and its checksum."""
        coded = self._payloads.get(codec.name)
        if coded is None:
            payload = codec.encode(VectorSource(self.vector))
            coded = self._payloads[codec.name] = (payload, wire.checksum(payload))
        return coded


class WaitingUpdate(msgspec.Struct, frozen=True, gc=False):
    """A buffered update: the source of its values, its codec and its payload."""

    source: Source
    codec: str
    payload: wire.Buffer


class WaitingUpdates(msgspec.Struct, frozen=True):
    """The buffered updates at one moment, by handle, and the next unused handle."""

    updates: dict[int, WaitingUpdate]
    handle_next: int


class UpdateState(msgspec.Struct, array_like=True):
    """The durable fields of an update; its payload is saved as an array."""

    handle: int
    codec: str


class SnapshotState(msgspec.Struct, array_like=True):
    """The number of a version, and the name of its array.

    The name is `CURRENT` if the version has the same vector as the current version, which is saved
    as one array for each parameter.
    """

    number: int
    array: str


class ModelState(msgspec.Struct):
    """The durable fields of `HubModel`; its vectors and payloads are saved as arrays."""

    number: int
    optimizer: int
    kept: SnapshotState | None
    kept_last: SnapshotState | None
    updates: list[UpdateState]
    handle_next: int


class HubModel:
    """The current and the kept snapshots, the state of the optimizer, and buffered updates.

    `fold` may run in a different thread than the other methods, but only one fold may run at a
    time.
    """

    def __init__(
        self, spec: ParameterSpec, initial: Vector, number: int, policy: PolicySet, float16: SixteenBits = FLOAT16
    ) -> None:
        spec.check(initial)
        policy = guarded(policy)
        self.spec = spec
        self.codecs = Codecs(spec, float16)
        self.optimizer = tuple(policy.optimizer)
        self._takes_models = policy.aggregate.update == "model"
        self._combine = policy.combine
        vectors = state_vectors(self.optimizer) + self._combine.centred
        self._state = [np.zeros(spec.trained_length, np.float32) for _ in range(vectors)]
        """The optimizer's vectors and, if the combiner has a centre, the centre."""
        self._updates: dict[int, WaitingUpdate] = {}
        self._handle_next = 0
        self._pool = BufferPool(spec.nbytes)
        self._decoded = BufferPool(spec.nbytes)
        self._mixer = Mixer(policy, spec)
        vector = self._pool.take_vector()
        vector[:] = initial
        self.current = Snapshot(number, vector)
        self._kept = self._kept_last = self.current if policy.monitor.rolls_back else None

    @property
    def snapshots_alive(self) -> int:
        """The number of snapshots in use: the current one and those being sent.

        Versions that are kept only for a rollback do not count.
        """
        if not self._pool.in_use:
            return 0  # small vectors are not counted
        kept = {id(snapshot.vector) for snapshot in (self._kept, self._kept_last) if snapshot}
        return max(0, self._pool.in_use - len(kept - {id(self.current.vector)}))

    @property
    def updates_waiting(self) -> int:
        """The number of buffered updates."""
        return len(self._updates)

    def keep(self, update: WaitingUpdate) -> int:
        """Buffer an update; return its handle."""
        handle = self._handle_next
        self._handle_next += 1
        self._updates[handle] = update
        return handle

    def hold(self, handle: int, update: WaitingUpdate) -> None:
        """Buffer an update under the handle that it had before."""
        self._updates[handle] = update
        self._handle_next = max(self._handle_next, handle + 1)

    def holds(self, handle: int) -> bool:
        """Return whether there is a buffered update with this handle."""
        return handle in self._updates

    def payload(self, handle: int) -> wire.Buffer:
        """Return the payload that was received for an update."""
        return self._updates[handle].payload

    def release(self, handle: int) -> Source:
        """Remove an update from the buffer; return its values."""
        return self._updates.pop(handle).source

    def norm(self, update: Source) -> float:
        """Return the norm of an update's trained values.

        The norm is not finite if any value is not finite.
        """
        origin = self.current.vector if self._takes_models else None
        return norm_of(update, self.spec.trained_length, origin)

    def measure(self, update: Source) -> tuple[Source, float]:
        """Return the norm of an update, and a source of its values that need no further decoding.

        If there is no memory for the decoded values, the source is `update`.
        """
        fits = (self._decoded.in_use + 1) * self.spec.nbytes <= DECODED_BYTES_MAX
        if fits and not isinstance(update, VectorSource):
            vector = self._decoded.take().view(np.float32)
            copy_range(vector, update)
            update = VectorSource(vector)
        return update, self.norm(update)

    def keep_current(self) -> None:
        """Keep the current version and the last kept version for a rollback; drop older ones."""
        self._kept, self._kept_last = self._kept_last, self.current

    def restore(self, number: int) -> Snapshot:
        """Return the older of the kept versions under a new number; reset the optimizer."""
        for vector in self._state:
            vector.fill(0.0)
        if self._kept is None:
            raise ValueError("no version was kept for a rollback")
        self._kept_last = self._kept
        return Snapshot(number, self._kept.vector)

    def fold(self, fold: Fold, updates: Sequence[Source]) -> tuple[Snapshot, float]:
        """Compute the next version; the caller makes it the current one with `advance`.

        Also return the norm of the weighted sum of the updates. The norm is 0 unless the fold has
        `measure` set. It is NaN if the learning rate is 0, because the sum cannot be computed then.
        """
        if fold.number != self.current.number + 1:
            raise ValueError(
                f"fold {fold.number} must follow version {fold.number - 1}, not {self.current.number}"
            )
        current, target = self.current.vector, self._pool.take_vector()
        trained = self.spec.trained_length
        factor, used = leading_factor(self.optimizer, fold.plan)
        rest, plan = self.optimizer[used:], fold.plan[used:]
        if not rest:
            factor *= fold.scale
        weights = self._weights(fold, updates, current)
        # The pseudo-gradient of a delta is minus the delta.
        terms = self._terms(fold, updates, [-weight * factor for weight in weights])
        square_sum = 0.0
        combined = self._combine.whole and len(updates) > 1
        if combined:
            self._combine_whole(self._terms(fold, updates, weights), current, target, -factor)
        for start in range(0, trained, CHUNK):
            stop = min(start + CHUNK, trained)
            step = target[start:stop] if combined else self._mixer.mix(terms, current, slice(start, stop), target)
            if self._combine.centred:
                self._centre(step, slice(start, stop), factor, sum(fold.weights), sum(weights))
            if fold.measure:
                square_sum += square_sum_of(step)
            if rest:
                apply_chain(rest, step, current[start:stop], [vector[start:stop] for vector in self._state], plan)
                if fold.scale != 1.0:
                    np.multiply(step, np.float32(fold.scale), out=step)
            np.subtract(current[start:stop], step, out=step)
        if trained < self.spec.length:
            self._fold_statistics(fold, updates, weights, target, combined=combined)
        return Snapshot(fold.number, target), math.sqrt(square_sum) / factor if factor else math.nan

    def advance(self, snapshot: Snapshot) -> None:
        """Make a folded snapshot the current one."""
        self.current = snapshot

    # -- durable state ---------------------------------------------------------------------------------------

    def waiting(self, handles: Sequence[int]) -> WaitingUpdates:
        """Return the buffered updates with these handles, for a checkpoint.

        They may be folded before the checkpoint is written.
        """
        return WaitingUpdates({handle: self._updates[handle] for handle in handles}, self._handle_next)

    def dump_state(self, waiting: WaitingUpdates) -> tuple[ModelState, dict[str, Array]]:
        """Return the durable state and its arrays, with the updates of `waiting`.

        Call this once all folds decided before `waiting` was captured are done, and before any
        later fold. The current version is not among the arrays; write it under the names of
        `spec.views`. Only the optimizer's vectors are copied, since the other vectors never change.
        If versions share a vector, they share an array, too.
        """
        arrays: dict[str, Array] = {
            f"optimizer/{place}": vector.copy() for place, vector in enumerate(self._state)
        }
        names = {id(self.current.vector): CURRENT}

        def name(snapshot: Snapshot, place: str) -> SnapshotState:
            key = id(snapshot.vector)
            if key not in names:
                names[key] = f"{place}/{snapshot.number}"
                arrays[names[key]] = snapshot.vector
            return SnapshotState(snapshot.number, names[key])

        for handle, update in waiting.updates.items():
            arrays[f"update/{handle}"] = np.frombuffer(update.payload, np.uint8)
        state = ModelState(
            number=self.current.number,
            optimizer=len(self._state),
            kept=None if self._kept is None else name(self._kept, "kept"),
            kept_last=None if self._kept_last is None else name(self._kept_last, "kept"),
            updates=[UpdateState(handle, update.codec) for handle, update in waiting.updates.items()],
            handle_next=waiting.handle_next,
        )
        return state, arrays

    def load_state(self, state: ModelState, parameters: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
        """Restore a durable state, with `parameters` as the current version.

        The arrays are copied. Raises `StorageError` if an array is missing or has the wrong length.
        """
        rolls_back = self._kept is not None
        kept = [snapshot for snapshot in (state.kept, state.kept_last) if snapshot is not None]
        if state.optimizer != len(self._state) or len(kept) != 2 * rolls_back:
            raise StorageError("the hub's state was written with another policy; resume it with that policy")
        snapshots: dict[tuple[int, str], Snapshot] = {}
        vectors: dict[str, Vector] = {}

        def read(snapshot: SnapshotState) -> Snapshot:
            key = snapshot.number, snapshot.array
            if key not in snapshots:
                if snapshot.array not in vectors:
                    vectors[snapshot.array] = self._read(snapshot.array, parameters, arrays)
                snapshots[key] = Snapshot(snapshot.number, vectors[snapshot.array])
            return snapshots[key]

        optimizer = [
            take_values(arrays, f"optimizer/{place}", vector.shape) for place, vector in enumerate(self._state)
        ]
        updates = {update.handle: self._open(update, arrays) for update in state.updates}
        current = read(SnapshotState(state.number, CURRENT))
        if kept:
            self._kept, self._kept_last = read(kept[0]), read(kept[1])
        self.current = current
        for vector, values in zip(self._state, optimizer, strict=True):
            vector[:] = values
        self._updates = updates
        self._handle_next = max([state.handle_next, *[handle + 1 for handle in updates]])

    def _read(self, name: str, parameters: Mapping[str, Array], arrays: Mapping[str, Array]) -> Vector:
        """Return a copy of a version."""
        vector = self._pool.take_vector()
        if name == CURRENT:
            for parameter, view in self.spec.views(vector).items():
                view[...] = take_values(parameters, parameter, view.shape)
        else:
            vector[:] = take_values(arrays, name, vector.shape)
        return vector

    def _open(self, update: UpdateState, arrays: Mapping[str, Array]) -> WaitingUpdate:
        payload = take_payload(arrays, f"update/{update.handle}")
        try:
            source = self.codecs.find(update.codec, len(payload)).open(payload)
        except ProtocolError as error:
            raise StorageError(
                f"update {update.handle} of the hub's state is invalid ({error}); choose an older checkpoint"
            ) from error
        return WaitingUpdate(source, update.codec, payload)

    # -- internals -------------------------------------------------------------------------------------------

    def _terms(self, fold: Fold, updates: Sequence[Source], scales: Sequence[float]) -> list[Term]:
        """Return the updates with their scales and rows."""
        return list(map(Term, updates, scales, fold.rows or repeat(-1)))

    def _combine_whole(self, terms: Sequence[Term], current: Vector, target: Vector, factor: float) -> None:
        """Combine the updates, including their statistics, with a whole-update combiner.

        The trained values of the result are multiplied by `factor`.
        """
        trained, length = self.spec.trained_length, self.spec.length
        self._mixer.mix_whole(terms, current, slice(0, trained), target)
        np.multiply(target[:trained], np.float32(factor), out=target[:trained])
        if trained < length:
            self._mixer.mix_whole(terms, current, slice(trained, length), target)

    def _fold_statistics(
        self, fold: Fold, updates: Sequence[Source], weights: Sequence[float], target: Vector, *, combined: bool
    ) -> None:
        """Compute the next statistics, as a convex combination, without the optimizer.

        If `combined` is set, `target` already contains the combination of the updates.
        """
        current, share = self.current.vector, max(1.0, sum(fold.weights))
        terms = self._terms(fold, updates, [-weight / share for weight in weights])
        for start in range(self.spec.trained_length, self.spec.length, CHUNK):
            at = slice(start, min(start + CHUNK, self.spec.length))
            step = target[at]
            if combined:
                np.multiply(step, np.float32(-1.0 / share), out=step)
            else:
                self._mixer.mix(terms, current, at, target)
            np.subtract(current[at], step, out=step)

    def _weights(self, fold: Fold, updates: Sequence[Source], current: Vector) -> Sequence[float]:
        """Return the weights of the updates after clipping by a combiner with a centre."""
        if not isinstance(self._combine, CentredClipCombiner) or not math.isfinite(fold.norm_usual):
            return fold.weights
        terms = self._terms(fold, updates, fold.weights)
        distances = self._mixer.distances(terms, current, self._state[-1])
        shares = self._combine.shares(distances, fold.norm_usual)
        return [weight * share for weight, share in zip(fold.weights, shares, strict=True)]

    def _centre(self, step: Vector, at: slice, factor: float, weight: float, told: float) -> None:
        """Add the centre's share to a step, then move the centre towards the result.

        `told` is the sum of the clipped weights of the updates. The centre's weight is `weight`
        minus `told`.
        """
        centre = self._state[-1][at]
        rest = np.multiply(centre, np.float32(-(weight - told) * factor))
        np.add(step, rest, out=step)
        if isinstance(self._combine, CentredClipCombiner) and factor * weight:
            self._combine.move(centre, np.multiply(step, np.float32(-1.0 / (factor * weight)), out=rest))
