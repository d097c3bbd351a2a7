"""Computes a checksum of frozen arrays: parameters that are not trained, and integer tables."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from edgeasync.protocol.messages import Framework, Frozen

PIECE = 1 << 15
"""Number of values read at a time. They fit into the cache, and torch converts them on one thread.
"""


class FrozenArray(NamedTuple):
    """An array that is not trained. Its values come in pieces, in row-major order."""

    name: str
    shape: Sequence[int]
    pieces: Iterable[npt.NDArray[Any]]


def frozen_checksum(framework: Framework, arrays: Iterable[FrozenArray]) -> Frozen | None:
    """Return the checksum of arrays in any order, or `None` if there are none.

    Floating-point values are hashed as float32, integers unchanged. `docs/reference/wire`
    defines the format.
    """
    rows = sorted([(name, tuple(shape), *_digest(pieces)) for name, shape, pieces in arrays])
    if not rows:
        return None
    return Frozen(framework, sha256(msgspec.msgpack.encode(rows)).hexdigest()[:32])


def pieces_of(array: npt.ArrayLike) -> Iterator[npt.NDArray[Any]]:
    """Yield an array's values in pieces."""
    flat = np.asarray(array).reshape(-1)
    for start in range(0, flat.size, PIECE):
        yield flat[start : start + PIECE]


def _digest(pieces: Iterable[npt.NDArray[Any]]) -> tuple[str, bytes]:
    """Return the type as which values are hashed, and the XXH3-128 of their bytes."""
    digest, dtype = xxhash.xxh3_128(), "float32"
    for piece in pieces:
        kind = piece.dtype.kind
        dtype = piece.dtype.name if kind in "biu" else "complex64" if kind == "c" else "float32"
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(piece, np.dtype(dtype).newbyteorder("<"))
        if dtype == "float32":
            values = values + np.float32(0.0)  # converts -0.0 to 0.0
        digest.update(values.view(np.uint8).data)
    return dtype, digest.digest()
