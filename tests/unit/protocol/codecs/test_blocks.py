"""Block codecs: int8, int4 and sign."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.codecs.blocks import BLOCK
from tests.support.codecs.codecs import flat
from tests.support.codecs.coded_vectors import cases, there_and_back


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
