import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeasync.errors import ProtocolError
from edgeasync.protocol.codecs import CODECS, Float16, Identity, find_codec

LENGTHS = st.integers(0, 200)
BIT_PATTERNS = hnp.arrays(np.uint32, LENGTHS, elements=st.integers(0, 2**32 - 1))
"""Every float32 there is: subnormals, infinities, and NaNs with any payload."""


def read_all(codec, payload, length):
    return codec.read(payload, 0, length, np.empty(length, np.float32))


def test_the_table_holds_each_codec_under_its_name():
    assert all(codec.name == name for name, codec in CODECS.items())
    assert {"identity", "float16"} <= set(CODECS)


@given(BIT_PATTERNS)
def test_identity_keeps_every_bit(bits):
    codec = Identity()
    payload = codec.encode(bits.view(np.float32))
    assert bytes(payload) == bits.astype("<u4").tobytes()
    assert len(payload) == codec.payload_bytes(bits.size)
    np.testing.assert_array_equal(read_all(codec, payload, bits.size).view(np.uint32), bits)


def test_identity_neither_copies_nor_lets_a_reader_write():
    vector = np.arange(4, dtype=np.float32)
    payload = Identity().encode(vector)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), vector)
    received = bytearray(payload)
    values = Identity().read(received, 1, 3, np.empty(2, np.float32))
    assert np.shares_memory(values, np.frombuffer(received, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1.0


@given(BIT_PATTERNS)
def test_float16_is_numpys_rounding_and_widening(bits):
    vector = bits.view(np.float32)
    with np.errstate(all="ignore"):
        halves = vector.astype(np.float16)
        expected = halves.astype(np.float32)
    payload = Float16().encode(vector)
    assert bytes(payload) == halves.astype("<f2").tobytes()
    assert len(payload) == Float16().payload_bytes(bits.size)
    np.testing.assert_array_equal(read_all(Float16(), payload, bits.size), expected)


@pytest.mark.parametrize(
    ("value", "coded"),
    [
        (1.0, "003c"),
        (-2.0, "00c0"),
        (65504.0, "ff7b"),
        (65520.0, "007c"),  # rounds to infinity, which the hub refuses as not finite
        (1.0 + 2**-11, "003c"),  # a tie goes to even
        (1.0 + 3 * 2**-11, "023c"),
        (2.0**-24, "0100"),
    ],
)
def test_float16_bytes_by_hand(value, coded):
    assert bytes(Float16().encode(np.array([value], np.float32))).hex() == coded


@given(st.data(), st.sampled_from(sorted(CODECS)), hnp.arrays(np.float32, LENGTHS, elements=st.floats(width=32)))
def test_any_range_reads_as_the_slice_of_the_whole(data, name, vector):
    codec = CODECS[name]
    payload = bytes(codec.encode(vector))
    start = data.draw(st.integers(0, vector.size))
    stop = data.draw(st.integers(start, vector.size))
    scratch = np.full(vector.size + 3, np.nan, np.float32)
    part = codec.read(payload, start, stop, scratch)
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, read_all(codec, payload, vector.size)[start:stop])


@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=64))
def test_any_bytes_of_the_right_length_can_be_read(name, payload):
    codec = CODECS[name]
    length = len(payload) // codec.payload_bytes(1)
    assert read_all(codec, payload, length).shape == (length,)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("off_by", [-4, -1, 1, 4])
def test_wrong_length_is_refused(name, off_by):
    right = CODECS[name].payload_bytes(10)
    assert find_codec(name, right, 10) is CODECS[name]
    with pytest.raises(ProtocolError, match=f"a {name} payload of 10 values has {right} bytes"):
        find_codec(name, right + off_by, 10)


@pytest.mark.parametrize("name", ["", "Identity", "bfloat16"])
def test_unknown_codec_is_refused_with_the_known_ones(name):
    with pytest.raises(ProtocolError, match=r"unknown codec '.*'; known: identity, float16"):
        find_codec(name, 40, 10)
