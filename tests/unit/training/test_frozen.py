"""The checksum of arrays that do not travel: docs/reference/wire.md says how, and others compute it by that."""

import hashlib

import msgpack
import numpy as np
import pytest
import xxhash

from edgeasync.protocol.messages import Frozen
from edgeasync.training.frozen import PIECE, FrozenArray, frozen_checksum, pieces_of

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
    "b.table": np.arange(4),
    "mask": np.array([True, False]),
}


def checksum_of(arrays):
    found = frozen_checksum("jax", [FrozenArray(name, np.shape(a), pieces_of(a)) for name, a in arrays.items()])
    return None if found is None else found.checksum


def changed(**arrays):
    return ARRAYS | {name.replace("_", "."): array for name, array in arrays.items()}


def test_it_is_what_the_document_says():
    types = {"a.weight": "float32", "b.table": "int64", "mask": "bool"}
    rows = [
        [name, list(array.shape), types[name], xxhash.xxh3_128(array.tobytes()).digest()]
        for name, array in sorted(ARRAYS.items())
    ]
    expected = hashlib.sha256(msgpack.packb(rows)).hexdigest()[:32]
    assert frozen_checksum("torch", []) is None
    assert checksum_of(ARRAYS) == expected
    assert frozen_checksum("torch", [FrozenArray("a", (), pieces_of(1.0))]) == Frozen(
        "torch", checksum_of({"a": np.float32(1.0)})
    )


@pytest.mark.parametrize(
    "same",
    [
        dict(reversed(ARRAYS.items())),
        changed(a_weight=ARRAYS["a.weight"].astype(np.float64)),
        changed(a_weight=ARRAYS["a.weight"].astype(np.float16)),
        changed(a_weight=np.asfortranarray(ARRAYS["a.weight"])),
        changed(a_weight=ARRAYS["a.weight"].astype(">f4")),
        changed(b_table=np.arange(8)[::2] // 2),
    ],
    ids=["order", "float64", "float16", "fortran", "big-endian", "strides"],
)
def test_the_same_values_have_the_same(same):
    assert checksum_of(same) == checksum_of(ARRAYS)


@pytest.mark.parametrize(
    "other",
    [
        changed(a_weight=ARRAYS["a.weight"] + np.float32(1e-6)),
        changed(a_weight=ARRAYS["a.weight"].reshape(3, 2)),
        changed(b_table=np.arange(4, dtype=np.float32)),
        changed(more=np.zeros(1)),
        {("c.weight" if name == "a.weight" else name): array for name, array in ARRAYS.items()},
        {name: array for name, array in ARRAYS.items() if name != "mask"},
    ],
    ids=["value", "shape", "type", "added", "renamed", "missing"],
)
def test_others_have_another(other):
    assert checksum_of(other) != checksum_of(ARRAYS)


def test_large_arrays_are_read_in_pieces():
    array = np.arange(2 * PIECE + 3, dtype=np.float64)
    pieces = list(pieces_of(array))
    assert [piece.size for piece in pieces] == [PIECE, PIECE, 3]
    assert all(piece.base is not None for piece in pieces), "not copied"
    whole = frozen_checksum("torch", [FrozenArray("a", array.shape, [array])])
    assert whole == frozen_checksum("torch", [FrozenArray("a", array.shape, pieces)])
