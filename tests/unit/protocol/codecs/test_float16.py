"""float16 conversion, against numpy."""

import numpy as np
import pytest

from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.codecs.codecs import decode, flat
from tests.support.codecs.coded_vectors import bits


@pytest.mark.parametrize("start", range(0, 2**32, 2**29))
def test_float16_is_numpys_rounding(start):
    vector = np.arange(start, start + 2**29, 9973, dtype=np.uint32).view(np.float32)
    special = np.array([0, 2**-24, 2**-25, 2**-14, 65504, 65519.996, 65520, np.inf, 1 + 2**-11, 1 + 3 * 2**-11])
    vector = np.concatenate([vector, special.astype(np.float32), -special.astype(np.float32)])
    codec = make_codec("float16", flat(vector.size))
    with np.errstate(all="ignore"):
        expected = vector.astype("<f2")
    coded = np.frombuffer(codec.encode(VectorSource(vector)), "<f2")
    signalling = np.isnan(vector) & (bits(vector) & 0x400000 == 0)  # machines differ in what becomes of these
    np.testing.assert_array_equal(np.isnan(coded), np.isnan(expected))
    np.testing.assert_array_equal(coded.view(np.uint16)[~signalling], expected.view(np.uint16)[~signalling])


def test_every_float16_widens_as_numpy_does():
    halves = np.arange(65536, dtype=np.uint16)
    decoded = decode(make_codec("float16", flat(halves.size)), halves.tobytes(), halves.size)
    with np.errstate(all="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    quiet = ~np.isnan(expected) | (halves & 0x200 != 0)
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(expected))
    np.testing.assert_array_equal(bits(decoded)[quiet], bits(expected)[quiet])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("start", range(0, 2**32, 2**28))
def test_rounding_in_place_is_encoding_and_decoding_to_the_bit(name, start):
    edges = np.array([0, 0x38800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47000000, 0x7F800000], np.int64)
    numbers = np.concatenate(
        [np.arange(start, start + 2**28, 9973), *(start + edges % 2**28 + i for i in range(-3, 4))]
    )
    vector = (numbers % 2**32).astype(np.uint32).view(np.float32)
    for part in (
        vector,
        np.append(vector[np.abs(vector) < 3e4], np.float32(-0.0)),
    ):  # all, and those without infinities
        codec = make_codec(name, flat(part.size))
        expected = decode(codec, bytes(codec.encode(VectorSource(part))), part.size)
        rounded = part.copy()
        codec.round_in_place(rounded)
        np.testing.assert_array_equal(bits(rounded), bits(expected))
