"""What codecs keep: every one through the same interface, and each by what it promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.parameters import CHUNK
from edgeasync.protocol.codecs import VectorSource, make_codec, payload_bytes_limit
from edgeasync.protocol.codecs.blocks import BLOCK
from tests.support.codecs.codecs import decode, flat
from tests.support.codecs.coded_vectors import LONG, bits, cases, every_codec, long_vector, random, there_and_back


@every_codec
@given(case=cases())
def test_lengths_keep_their_bounds_and_statistics_every_bit(name, case):
    spec, vector = case
    codec = make_codec(name, spec)
    payload = codec.encode(VectorSource(vector), random())
    assert codec.payload_bytes_min <= len(payload) <= codec.payload_bytes_max <= payload_bytes_limit(spec)
    decoded = codec.open(bytes(payload))
    assert decoded.length == spec.length
    statistics = decoded.read(spec.trained_length, spec.length, np.empty(spec.length, np.float32))
    np.testing.assert_array_equal(bits(statistics), bits(vector[spec.trained_length :]))


@every_codec
@given(case=cases(), data=st.data())
def test_any_range_reads_as_the_slice_of_the_whole(name, case, data):
    spec, vector = case
    codec = make_codec(name, spec)
    decoded = codec.open(bytes(codec.encode(VectorSource(vector), random())))
    whole = np.array(decoded.read(0, spec.length, np.empty(spec.length, np.float32)))
    start = data.draw(st.integers(0, spec.length))
    stop = data.draw(st.integers(start, spec.length))
    part = decoded.read(start, stop, np.full(stop - start, np.nan, np.float32))
    assert part.dtype == np.float32
    np.testing.assert_array_equal(bits(part), bits(whole[start:stop]))


@every_codec
def test_chunks_of_a_long_vector_and_an_unaligned_payload_read_as_the_whole(name):
    codec = make_codec(name, LONG)
    payload = codec.encode(VectorSource(long_vector()), random())
    whole = decode(codec, payload, LONG.length)
    unaligned = codec.open(memoryview(b"x" + bytes(payload))[1:])
    scratch = np.empty(CHUNK, np.float32)
    for start in (*range(0, LONG.length, CHUNK), 1, BLOCK + 3, 90_301, CHUNK - 5, LONG.length - 12):
        stop = min(start + CHUNK, LONG.length)
        np.testing.assert_array_equal(unaligned.read(start, stop, scratch), whole[start:stop])


@every_codec
@given(case=cases(largest=1e30), value=st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001]), data=st.data())  # fmt: skip  # noqa: E501
def test_what_is_not_finite_stays_so(name, case, value, data):
    spec, vector = case
    bits(vector)[data.draw(st.integers(0, spec.length - 1))] = value
    assert not np.isfinite(there_and_back(name, spec, vector)).all()


@every_codec
def test_what_is_not_finite_in_a_long_vector_stays_so(name):
    vector = long_vector()
    vector[[70_000, LONG.length - 20]] = np.inf
    decoded = there_and_back(name, LONG, vector)
    assert not np.isfinite(decoded).all()
    assert np.isfinite(decoded[:60_000]).all()


@pytest.mark.parametrize("name", ["int8", "int8(stochastic)", "top_k(0.5)+int4(stochastic)", "float16", "sign"])
def test_a_codec_draws_only_if_it_is_stochastic(name):
    codec, generator = make_codec(name, flat(1000)), random()
    before = generator.bit_generator.state
    codec.encode(VectorSource(np.ones(1000, np.float32)), generator)
    assert codec.stochastic == (generator.bit_generator.state != before) == ("stochastic" in name)
