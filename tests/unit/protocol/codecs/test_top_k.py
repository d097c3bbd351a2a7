"""The top_k codec keeps exactly the largest values."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.codecs.top_k import SAMPLE
from tests.support.codecs.codecs import flat
from tests.support.codecs.coded_vectors import cases, largest, there_and_back


@pytest.mark.parametrize("fraction", ["0.01", "0.3", "0.5"])
@given(case=cases(st.integers(1, 300).map(flat)))
def test_top_k_keeps_exactly_the_largest(fraction, case):
    spec, vector = case
    kept = largest(vector, math.ceil(Fraction(fraction) * vector.size))
    np.testing.assert_array_equal(there_and_back(f"top_k({fraction})", spec, vector), kept)


@pytest.mark.parametrize(
    ("fraction", "length", "kept"), [("0.07", 100, 7), ("0.14", 100, 14), ("0.28", 10_000, 2800)]
)
def test_top_k_counts_in_whole_numbers(fraction, length, kept):
    vector = np.arange(1, length + 1, dtype=np.float32)
    assert np.count_nonzero(there_and_back(f"top_k({fraction})", flat(length), vector)) == kept


def misleading(kind):
    """Return vectors that a sample says something wrong about."""
    vector = np.zeros(20 * SAMPLE, np.float32)
    noise = np.random.default_rng(3).standard_normal(vector.size).astype(np.float32)
    if kind == "even":
        vector[:] = noise
    elif kind == "equal":
        vector[:] = 0.5
    elif kind == "rare":
        vector[[3, 99_999, vector.size - 1]] = 1.0, -2.0, 3.0
    else:
        vector[:] = noise * np.float32(1e-6)
        vector[:: (20 * SAMPLE - 128) // 127] = 1e6  # every sampled run begins there, or nearly
        vector[50_000:51_000] = 1.0
    return vector


@pytest.mark.parametrize("kind", ["even", "equal", "rare", "few large"])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.4])
def test_top_k_of_a_long_vector_does_not_depend_on_its_sample(kind, fraction):
    vector = misleading(kind)
    kept = largest(vector, math.ceil(fraction * vector.size))
    np.testing.assert_array_equal(there_and_back(f"top_k({fraction})", flat(vector.size), vector), kept)


@given(st.sets(st.integers(0, 200_000), min_size=1, max_size=40), st.integers(2, 10))
def test_top_k_finds_every_place_again(places, spread):
    vector = np.zeros(200_001 if spread > 5 else 200_001 * spread, np.float32)
    vector[sorted(places)] = np.arange(1, len(places) + 1)
    vector[-spread:] = 1.0
    np.testing.assert_array_equal(there_and_back("top_k(0.01)", flat(vector.size), vector), vector)


def test_top_k_takes_about_a_byte_for_a_place():
    codec = make_codec("top_k(0.01)+int8", flat(1_000_000))
    vector = np.random.default_rng(1).standard_normal(1_000_000).astype(np.float32)
    assert len(codec.encode(VectorSource(vector))) < 10_000 * 2.15
