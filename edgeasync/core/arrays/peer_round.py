"""The arrays of one member in a round of peers: the snapshot, and the sum in segments."""

import math

import numpy as np

from edgeasync.core.arrays.delta_chain import all_finite, is_finite
from edgeasync.core.arrays.squares import square_sum_of
from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, Parameter, ParameterSpec, Vector
from edgeasync.protocol.codecs import VectorCodec, VectorSource, chunks, copy_range, find_codec, make_codec
from edgeasync.protocol.wire import Buffer

EMPTY = b"\0"
"""The payload of an empty segment, in a model with fewer values than there are members. A payload
must not be empty.
"""


class NotFiniteError(Exception):
    """This device's model, or a sum of models, contains values that are not finite."""


class PeerRound:
    """The arrays of one round. Its slow methods run in any thread, but only one at a time.

    In a `ring`, the sum is initialized with the snapshot, otherwise with zeros. The snapshot never
    changes. The first `trained_length` values of the snapshot are trained parameters, and the rest
    are statistics. `norms` contains the norms of these two parts. Raises `NotFiniteError` for a
    model whose norm overflows, since the norms of payloads could not be compared with this norm.
    """

    def __init__(
        self, parameters: Vector, segments: int, members: int, codec: str, *, ring: bool, trained_length: int
    ) -> None:
        self.snapshot = parameters.copy()
        self._trained_length = trained_length
        self.norms = _norms(self.snapshot, trained_length)
        if not all(map(math.isfinite, self.norms)):
            raise NotFiniteError(
                "training has diverged: this device's model has values that are too large or not finite"
            )
        self._sum = self.snapshot.copy() if ring else np.zeros_like(self.snapshot)
        self._segments = segments
        self._members = np.float32(members)
        self._codec = codec
        self._ring = ring

    def encode(self, segment: int, source: str, random: np.random.Generator) -> Buffer:
        """Encode a segment; raises `NotFiniteError`.

        If the source is `"mean"`, the segment of the sum is replaced by the decoded payload.
        """
        values = (self.snapshot if source == "snapshot" else self._sum)[self._range(segment)]
        if not values.size:
            return EMPTY
        if source == "mean":
            np.divide(values, self._members, out=values)
        if not all_finite(values):
            raise NotFiniteError("the sum of the members' models is too large for float32")
        codec = _codec_of(self._codec, values.size)
        payload = codec.encode(VectorSource(values), random)
        if source != "snapshot" and np.may_share_memory(np.frombuffer(payload, np.uint8), values):
            payload = bytes(payload)  # copy, because the sum changes while the payload is sent
        if codec.name == "identity":
            return payload
        decoded = codec.open(payload)
        if not is_finite(decoded):
            raise NotFiniteError(
                f"codec {codec.name!r} cannot represent this device's model, or the sum of the members' models: "
                "it has values that are too large; choose a codec with a larger range, such as 'identity'"
            )
        if source == "mean":
            copy_range(values, decoded)
        return payload

    def decode(self, payload: Buffer, segment: int, way: str) -> tuple[float, float] | None:
        """Decode a payload, and add it to a segment of the sum, or replace the segment.

        Return the norms of the payload's trained parameters and statistics, or `None` if the
        payload is invalid.
        """
        where = self._range(segment)
        values = self._sum[where]
        if not values.size:
            return (0.0, 0.0) if len(payload) == len(EMPTY) else None
        try:
            source = find_codec(self._codec, len(payload), _spec_of(values.size)).open(payload)
        except ProtocolError:
            return None
        norms = 0.0, 0.0
        for start, decoded in chunks(source, values.size):
            chunk = values[start : start + decoded.size]
            if not all_finite(decoded):
                return None
            trained, statistics = _norms(decoded, self._trained_length - where.start - start)
            norms = math.hypot(norms[0], trained), math.hypot(norms[1], statistics)
            if way == "add":
                with np.errstate(over="ignore"):  # detected when the sum is encoded or applied
                    np.add(chunk, decoded, out=chunk)
            else:
                chunk[:] = decoded
        return norms

    def apply(self, parameters: Vector) -> None:
        """Add the mean minus the snapshot to the parameters, and replace the statistics.

        If parameters have diverged since the snapshot, they are set to the mean. Raises
        `NotFiniteError` if the mean is not finite.
        """
        mean = self._sum
        if not self._ring:
            np.divide(mean, self._members, out=mean)
        if not all_finite(mean):
            raise NotFiniteError("the sum of the members' models is too large for float32")
        trained_length = self._trained_length
        parameters[trained_length:] = mean[trained_length:]
        for start in range(0, trained_length, CHUNK):
            stop = min(start + CHUNK, trained_length)
            with np.errstate(over="ignore", invalid="ignore"):
                moved = parameters[start:stop] - self.snapshot[start:stop]
                np.add(moved, mean[start:stop], out=moved)
            parameters[start:stop] = moved if all_finite(moved) else mean[start:stop]

    def _range(self, segment: int) -> slice:
        length = self._sum.size
        return slice(segment * length // self._segments, (segment + 1) * length // self._segments)


def _norms(values: Vector, trained: int) -> tuple[float, float]:
    """Return the norm of the first `trained` values, and the norm of the rest."""
    trained = min(max(trained, 0), values.size)
    with np.errstate(over="ignore"):
        return math.sqrt(square_sum_of(values[:trained])), math.sqrt(square_sum_of(values[trained:]))


def check_peer_codec(name: str) -> None:
    """Raise `ValueError` for a codec that is unknown, or too lossy for averaging models."""
    if _codec_of(name, 1).needs_feedback or name.startswith("top_k"):
        raise ValueError(
            f"codec = {name!r} is too lossy: peers send whole models; use identity, float16, bfloat16, int8 or "
            "int4"
        )


def _codec_of(name: str, length: int) -> VectorCodec:
    return make_codec(name, _spec_of(length))


def _spec_of(length: int) -> ParameterSpec:
    """Return a layout for a segment, regardless of the arrays of the model."""
    return ParameterSpec((Parameter("segment", (length,)),))
