"""Computes a checksum over frozen arrays: parameters that are not trained, and integer tables."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from edgeasync.protocol.messages import Framework, Frozen

PIECE = 1 << 15
"""Number of values per read. So few values fit into the cache, and torch converts them in only one
thread.
"""


class FrozenArray(NamedTuple):
    """An array that is not trained. `pieces` yields its values in row-major order."""

    name: str
    shape: Sequence[int]
    pieces: Iterable[npt.NDArray[Any]]


def frozen_checksum(framework: Framework, arrays: Iterable[FrozenArray]) -> Frozen | None:
    """Return a checksum over `arrays`, or `None` if there are no arrays.

    The order of the arrays does not matter. Floating-point values are converted to float32 before
    hashing; integers are not converted. `docs/reference/wire` defines the format.
    """
    rows = sorted([(name, tuple(shape), *_digest(pieces)) for name, shape, pieces in arrays])
    if not rows:
        return None
    return Frozen(framework, sha256(msgspec.msgpack.encode(rows)).hexdigest()[:32])


def pieces_of(array: npt.ArrayLike) -> Iterator[npt.NDArray[Any]]:
    """Yield an array's values in pieces of at most `PIECE` values."""
    flat = np.asarray(array).reshape(-1)
    for start in range(0, flat.size, PIECE):
        yield flat[start : start + PIECE]


def _digest(pieces: Iterable[npt.NDArray[Any]]) -> tuple[str, bytes]:
    """Return the dtype that values are converted to, and the XXH3-128 of the converted bytes."""
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
