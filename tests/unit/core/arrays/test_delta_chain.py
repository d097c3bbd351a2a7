"""Whether vectors are finite, and what encodes a step."""

import numpy as np
import pytest

from edgeasync.core.arrays.delta_chain import all_finite, generator_for, is_finite
from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.codecs.codecs import flat

LENGTH = 70_000


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, LENGTH - 1])
def test_one_value_that_is_not_finite_is_found(value, place):
    vector = np.ones(LENGTH, np.float32)
    vector[place] = value
    assert not all_finite(vector)
    assert not is_finite(VectorSource(vector))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1.0, 3.4e38, -3.4e38])
def test_finite_values_are_finite_even_if_their_squares_are_not(value):
    vector = np.full(LENGTH, value, np.float32)
    assert all_finite(vector)
    assert is_finite(VectorSource(vector))


def test_only_a_codec_that_draws_gets_a_generator():
    assert generator_for(make_codec("int8", flat(5)), 3) is None
    drawn = generator_for(make_codec("int8(stochastic)", flat(5)), 3)
    assert drawn.random() == np.random.Generator(np.random.PCG64(3)).random()
