"""Whatever bytes a peer sends, a payload is refused as `ProtocolError` or can be read; and names likewise."""

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from edgeasync.protocol.codecs import (
    STAGES,
    VectorSource,
    find_codec,
    make_codec,
    payload_bytes_limit,
)
from tests.support.codecs.codecs import NAMES, decode, flat

SPEC = ParameterSpec((Parameter("w", (20, 30)), Parameter("b", (7,)), Parameter("m", (5,), "statistic")))
needs_zstd = pytest.mark.skipif("zstd" not in STAGES, reason="the zstandard package is missing")
every_codec = pytest.mark.parametrize("name", NAMES)


def valid_payload(name, spec=SPEC):
    vector = np.random.default_rng(1).standard_normal(spec.length).astype(np.float32)
    return bytearray(make_codec(name, spec).encode(VectorSource(vector), np.random.default_rng(1)))


def refuse_or_read(name, payload):
    """Do what a hub does; warnings are errors here."""
    with contextlib.suppress(ProtocolError):
        codec = find_codec(name, len(payload), SPEC)
        source = codec.open(payload)
        assert source.length == SPEC.length
        for start in range(0, SPEC.length, 100):
            stop = min(start + 100, SPEC.length)
            assert source.read(start, stop, np.empty(100, np.float32)).shape == (stop - start,)


@every_codec
@given(payload=st.one_of(st.binary(max_size=3000), st.integers(0, 2**32).map(np.random.default_rng)))
def test_any_bytes_are_refused_or_read(name, payload):
    if not isinstance(payload, bytes):
        payload = payload.bytes(len(valid_payload(name)))
    refuse_or_read(name, payload)
    with contextlib.suppress(ProtocolError):  # who does not look at the length first
        make_codec(name, SPEC).open(payload)


@every_codec
@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_payload_that_is_too_short_or_long_is_refused(name, change):
    payload = valid_payload(name)
    payload = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(ProtocolError):
        make_codec(name, SPEC).open(payload)
    codec = make_codec(name, SPEC)
    for length in (codec.payload_bytes_min - 1, codec.payload_bytes_max + 1):
        with pytest.raises(ProtocolError, match=r"invalid payload of \d+ bytes: .* needs \d+.* bytes"):
            find_codec(name, length, SPEC)


@every_codec
def test_bounds_of_small_and_large_models_stay_under_the_limit(name):
    for length in (1, 2, 3, 7, 63, 64, 65, 255, 256, 257, 65_535, 65_537, 1_000_003, 250_000_000):
        spec = flat(length)
        assert make_codec(name, spec).payload_bytes_max <= payload_bytes_limit(spec) < 4.01 * length + 256


@pytest.mark.parametrize("name", ["int8", "int4", "sign"])
@pytest.mark.parametrize("scale", ["0000c07f", "0000807f", "000080ff", "ffff7f7f", "0100807f", "ffffffff"])
def test_any_scale_is_read_without_a_warning(name, scale):
    codec = make_codec(name, flat(8))
    payload = bytes.fromhex(scale) + bytes([128]) * (codec.payload_bytes_min - 4)
    decoded = decode(codec, payload, 8)
    assert not np.isfinite(decoded).all() or name == "sign"


def sparse(count, width, values, symbols, statistics=b""):
    header = np.array([count, width], "<u4").tobytes()
    return header + np.array(values, "<f4").tobytes() + bytes(symbols) + statistics


def test_top_k_payloads_by_hand():
    codec = make_codec("top_k(0.1)", flat(40))
    source = codec.open(sparse(3, 4, [1, 2, 3], [0x50, 0xFF, 0xF1]))
    np.testing.assert_array_equal(np.flatnonzero(source.read(0, 40, np.empty(40, np.float32))), [0, 6, 38])
    assert not decode(codec, sparse(0, 8, [], []), 40).any()


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (sparse(21, 8, range(21), [0] * 21), "21 of 40 values"),
        (sparse(2**32 - 1, 8, [], []), "invalid header"),
        (sparse(2, 5, [1, 2], [0, 0]), "symbols of 5 bits"),
        (sparse(2, 0, [1, 2], []), "symbols of 0 bits"),
        (sparse(4, 8, [1, 2], []), "do not fit"),
        (sparse(2, 8, [1, 2], [0]), "do not end"),
        (sparse(2, 8, [1, 2], [0, 40]), "position 41 is outside the 40"),
        (sparse(2, 8, [1, 2], [0, 255]), "do not end"),
        (sparse(2, 8, [1, 2], [0, 0, 0]), "cannot encode the positions"),
        (sparse(1, 4, [1], [0x00]), "do not end"),
        (sparse(1, 4, [1], [0xF0, 0xFF]), "do not end"),
        (sparse(1, 16, [1], [0, 0, 0]), "cannot encode the positions"),
        (sparse(1, 16, [1], [0xFE, 0xFF]), "position 65534"),
        (sparse(0, 4, [], [0xFF]), "do not end"),
    ],
)
def test_places_that_are_none_are_refused(payload, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        make_codec("top_k(0.1)", flat(40)).open(payload)


def test_a_megabyte_of_skips_takes_little_memory():
    codec = make_codec("top_k(0.1)", flat(1_000_000))
    payload = sparse(1, 4, [1], [255] * (codec.payload_bytes_max - 12))
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        codec.open(payload)
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()


@needs_zstd
def test_a_bomb_is_refused_before_it_goes_off():
    import zstandard  # noqa: PLC0415

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4 * CHUNK))
    right = zstandard.ZstdCompressor().compress(bytes(4 * CHUNK))
    codec = make_codec("identity+zstd", flat(CHUNK))
    assert not decode(codec, right, CHUNK).any()
    tracemalloc.start()
    for payload in (
        bomb,
        unsized,
        right + b"x",
        right + right,
        right[:-1],
        bytes(20),
        right[:7] + b"\x03" + right[8:],
    ):
        with pytest.raises(ProtocolError):
            codec.open(payload)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
