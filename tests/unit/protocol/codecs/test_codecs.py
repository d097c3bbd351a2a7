"""What codecs keep: every one through the same interface, and each by what it promises."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from edgeasync.protocol.codecs import VectorSource, make_codec, payload_bytes_limit
from edgeasync.protocol.codecs.blocks import BLOCK
from edgeasync.protocol.codecs.top_k import SAMPLE
from tests.support.codecs import NAMES, decode, flat

ELEMENTWISE = tuple(name for name in NAMES if name.removesuffix("+zstd") in {"identity", "float16", "bfloat16"})
every_codec = pytest.mark.parametrize("name", NAMES)

SHAPES = st.lists(hnp.array_shapes(min_dims=0, max_dims=3, max_side=12), max_size=3)
LONG = ParameterSpec(
    (
        Parameter("w", (300, 301)),
        Parameter("b", (301,)),
        Parameter("v", (2, 2 * CHUNK)),
        Parameter("m", (9,), "statistic"),
    )
)


def random():
    return np.random.Generator(np.random.PCG64(7))


@st.composite
def specs(draw):
    roles = [("trained", draw(SHAPES)), ("statistic", draw(SHAPES))]
    parameters = [Parameter(f"{role}{i}", shape, role) for role, shapes in roles for i, shape in enumerate(shapes)]
    return ParameterSpec(tuple(parameters) or (Parameter("w", (1,)),))


@st.composite
def cases(draw, specs=specs(), largest=1e38):  # noqa: B008
    """Return a spec and a vector of it: some values of any kind, finite, at random places, or among others."""
    spec = draw(specs)
    bound = float(np.float32(largest))
    values = draw(st.lists(st.floats(-bound, bound, width=32), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vector = rng.choice(np.array(values, np.float32), spec.length)
    if draw(st.booleans()):
        others = rng.random(spec.length) < 0.7
        vector[others] = rng.standard_normal(int(others.sum())).astype(np.float32)
    return spec, vector


def long_vector(seed=1):
    return np.random.default_rng(seed).standard_normal(LONG.length).astype(np.float32) * np.float32(1e-3)


class Difference:
    """What an agent sends: the difference of two vectors, made where it is read."""

    def __init__(self, new, old):
        self.new, self.old = new, old
        self.length = new.size

    def read(self, start, stop, scratch):
        assert scratch.size >= stop - start <= CHUNK
        return np.subtract(self.new[start:stop], self.old[start:stop], out=scratch[: stop - start])


def there_and_back(name, spec, vector):
    codec = make_codec(name, spec)
    return decode(codec, codec.encode(VectorSource(vector), random()), spec.length)


def bits(values):
    return values.view(np.uint32)


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
def test_a_source_that_is_no_vector_is_coded_alike(name):
    new, old = long_vector(1), long_vector(2)
    codec = make_codec(name, LONG)
    of_vector = codec.encode(VectorSource(new - old), random())
    assert bytes(codec.encode(Difference(new, old), random())) == bytes(of_vector)


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
    assert np.isfinite(decoded[:60_000]).all() or "low_rank" in name


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
    assert codec.needs_feedback == (name.startswith(("top_k", "low_rank")) or "sign" in name)
    with pytest.raises(TypeError, match="one by one"):
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


def by_block(vector, reduce):
    """Return what `reduce` makes of the magnitudes of each block, for each value."""
    blocks = [np.abs(vector[at : at + BLOCK]).astype(np.float64) for at in range(0, vector.size, BLOCK)]
    return np.concatenate([np.full(block.size, reduce(block)) for block in blocks])


BLOCKY = st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3]).map(flat)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("int8", 2 * 127), ("int8(stochastic)", 127), ("int4", 2 * 7), ("int4(stochastic)", 7)],
)
@given(case=cases(BLOCKY))
def test_quantized_values_are_within_a_step(name, steps, case):
    spec, vector = case
    error = np.abs(there_and_back(name, spec, vector).astype(np.float64) - vector)
    step = by_block(vector, np.max) * (1 + 1e-5) / steps
    small = by_block(vector, np.max) < 112 * 2.0**-126 * 2
    assert (error <= np.where(small, np.abs(vector), step)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_lies_on_levels_is_exact_and_ties_go_to_even(name):
    steps = {"int8": 127, "int4": 7}[name]
    vector = np.arange(-steps, steps + 0.5, 0.5, dtype=np.float32) * np.float32(2.0**-20)
    decoded = there_and_back(name, flat(vector.size), vector) * 2.0**20
    np.testing.assert_allclose(decoded, np.rint(vector * 2.0**20), rtol=1e-6)


@pytest.mark.parametrize("name", ["int8(stochastic)", "int4(stochastic)"])
def test_stochastic_rounding_has_the_right_mean(name):
    vector = np.full(100_000, 0.31, np.float32)
    vector[::BLOCK] = 1.0
    decoded = there_and_back(name, flat(vector.size), vector)
    assert decoded[vector < 1].mean(dtype=np.float64) == pytest.approx(0.31, rel=2e-3)
    with pytest.raises(ValueError, match="random"):
        make_codec(name, flat(2)).encode(VectorSource(vector[:2]))


@given(cases(BLOCKY, largest=1e30))
def test_sign_keeps_signs_and_mean_magnitudes(case):
    spec, vector = case
    decoded = there_and_back("sign", spec, vector)
    np.testing.assert_allclose(np.abs(decoded), by_block(vector, np.mean), rtol=1e-5, atol=1e-43)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(vector))


def largest(vector, count):
    """Return the vector with all but the largest `count` values zero; of equal ones the first are kept."""
    order = np.lexsort((np.arange(vector.size), -np.abs(vector)))[:count]
    kept = np.zeros_like(vector)
    kept[order] = vector[order]
    return kept


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


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (8, 5, 3, 3), (3, CHUNK + 100), (200, 500)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_finds_a_matrix_of_that_rank(shape, rank):
    rng = np.random.default_rng(rank)
    rows, columns = shape[0], math.prod(shape[1:])
    matrix = (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))).astype(np.float32)
    spec = ParameterSpec((Parameter("a", (3,)), Parameter("w", shape), Parameter("z", (2, 2))))
    vector = np.concatenate([np.float32([1, 2, 3]), matrix.reshape(-1), np.float32([4, 5, 6, 7])])
    decoded = there_and_back(f"low_rank({rank})", spec, vector)
    np.testing.assert_array_equal(decoded[:3], vector[:3])
    np.testing.assert_array_equal(decoded[-4:], vector[-4:])
    assert np.linalg.norm(decoded - vector) <= 1e-5 * np.linalg.norm(vector)


@pytest.mark.parametrize("rank", [1, 3])
@given(case=cases(st.tuples(st.integers(1, 30), st.integers(1, 30)).map(lambda s: ParameterSpec((Parameter("w", s),))), largest=1e6))  # fmt: skip  # noqa: E501
def test_low_rank_is_a_projection(rank, case):
    spec, vector = case
    decoded = there_and_back(f"low_rank({rank})", spec, vector)
    norm = np.linalg.norm(vector.astype(np.float64))
    assert np.linalg.norm(decoded.astype(np.float64) - vector) <= norm * (1 + 1e-4) + 1e-30


def test_low_rank_comes_close_to_the_best():
    rng = np.random.default_rng(5)
    left, right = np.linalg.qr(rng.standard_normal((120, 80)))[0], np.linalg.qr(rng.standard_normal((80, 80)))[0]
    values = 0.7 ** np.arange(80)
    matrix = (left * values @ right).astype(np.float32)
    spec = ParameterSpec((Parameter("w", matrix.shape),))
    error = np.linalg.norm(there_and_back("low_rank(4)", spec, matrix.reshape(-1)) - matrix.reshape(-1))
    assert error < 1.1 * np.linalg.norm(values[4:])
