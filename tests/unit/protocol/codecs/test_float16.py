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
