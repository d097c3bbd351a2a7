"""Codecs without blocks: identity, float16 and bfloat16."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.codecs.codecs import NAMES, flat
from tests.support.codecs.coded_vectors import bits, specs, there_and_back

ELEMENTWISE = tuple(name for name in NAMES if name.removesuffix("+zstd") in {"identity", "float16", "bfloat16"})


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(spec=specs(), data=st.data())
def test_rounded_values_travel_as_they_are(name, spec, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vector = rng.integers(0, 2**32, spec.length, np.uint32).view(np.float32)
    codec = make_codec(name, spec)
    assert codec.elementwise
    assert not codec.needs_feedback
    rounded = vector.copy()
    codec.round_in_place(rounded[: spec.trained_length])
    np.testing.assert_array_equal(bits(there_and_back(name, spec, vector)), bits(rounded))
    np.testing.assert_array_equal(bits(there_and_back(name, spec, rounded)), bits(rounded))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(ELEMENTWISE)))
def test_only_elementwise_codecs_round_in_place(name):
    codec = make_codec(name, flat(4))
    assert not codec.elementwise
    assert codec.needs_feedback == (name.startswith("top_k") or "sign" in name)
    with pytest.raises(TypeError, match="cannot round single values"):
        codec.round_in_place(np.zeros(4, np.float32))


def test_identity_neither_copies_nor_lets_a_reader_write():
    vector = np.arange(4, dtype=np.float32)
    codec = make_codec("identity", flat(3, statistics=1))
    payload = codec.encode(VectorSource(vector))
    assert np.shares_memory(np.frombuffer(payload, np.uint8), vector)
    received = bytearray(payload)
    values = codec.open(received).read(1, 3, np.empty(2, np.float32))
    assert np.shares_memory(values, np.frombuffer(received, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1.0


@given(hnp.arrays(np.float32, 8, elements=st.floats(width=32)))
def test_bfloat16_is_the_nearest_with_even_ties(vector):
    decoded = there_and_back("bfloat16", flat(8), vector)
    assert not (bits(decoded) & 0xFFFF).any()
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(vector))
    below = (bits(vector).astype(np.int64) & 0x7FFF0000, (bits(vector).astype(np.int64) & 0x7FFF0000) + 0x10000)
    magnitude = bits(vector).astype(np.int64) & 0x7FFFFFFF
    tie = 2 * magnitude == sum(below)
    up = (2 * magnitude > sum(below)) | (tie & (below[0] >> 16 & 1 == 1))
    number = ~np.isnan(vector)
    np.testing.assert_array_equal((bits(decoded) & 0x7FFFFFFF)[number], np.where(up, below[1], below[0])[number])
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(vector))
