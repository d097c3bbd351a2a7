"""A checksum of a model's arrays that stay on the device: frozen parameters, and tables of integers."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from edgeasync.protocol.messages import Framework, Frozen

PIECE = 1 << 15
"""Values that are read at a time. They stay in the cache, and torch converts them without further threads."""


class FrozenArray(NamedTuple):
    """An array that stays on the device: its values come in pieces, in row-major order."""

    name: str
    shape: Sequence[int]
    pieces: Iterable[npt.NDArray[Any]]


def frozen_checksum(framework: Framework, arrays: Iterable[FrozenArray]) -> Frozen | None:
    """Return the checksum of arrays in any order, `None` without any; `docs/reference/wire/index.md` defines it.

    Values of any precision count as float32, integers as they are.
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
    """Return the type that values are hashed as, and the XXH3-128 of their bytes."""
    digest, dtype = xxhash.xxh3_128(), "float32"
    for piece in pieces:
        kind = piece.dtype.kind
        dtype = piece.dtype.name if kind in "biu" else "complex64" if kind == "c" else "float32"
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(piece, np.dtype(dtype).newbyteorder("<"))
        if dtype == "float32":
            values = values + np.float32(0.0)  # so that -0.0 counts as 0.0
        digest.update(values.view(np.uint8).data)
    return dtype, digest.digest()
