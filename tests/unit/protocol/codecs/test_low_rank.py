"""The low_rank codec: a projection close to the best approximation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from tests.support.codecs.coded_vectors import cases, there_and_back


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
