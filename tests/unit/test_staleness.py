import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.staleness import PolynomialStaleness

EXPONENTS = st.floats(0.0, 10.0)
STALENESS = st.integers(0, 2**53)


@pytest.mark.parametrize(
    ("exponent", "staleness", "weight"),
    [
        (0.0, 1000, 1.0),
        (0.5, 0, 1.0),
        (0.5, 3, 0.5),
        (0.5, 8, 1 / 3),
        (0.5, 99, 0.1),
        (1.0, 4, 0.2),
        (2.0, 9, 0.01),
        (10.0, 1, 2**-10),
    ],
)
def test_weights_by_hand(exponent, staleness, weight):
    assert PolynomialStaleness(exponent=exponent)(staleness) == pytest.approx(weight, rel=1e-12)


@given(EXPONENTS, STALENESS, STALENESS)
def test_older_never_counts_more(exponent, one, other):
    policy = PolynomialStaleness(exponent=exponent)
    newer, older = sorted((one, other))
    assert 0.0 <= policy(older) <= policy(newer) <= policy(0) == 1.0
    assert math.isfinite(policy(older))


@given(EXPONENTS, st.integers(0, 1000), STALENESS)
def test_the_limit_is_the_last_that_counts(exponent, staleness_max, staleness):
    limited = PolynomialStaleness(exponent=exponent, staleness_max=staleness_max)
    free = PolynomialStaleness(exponent=exponent)
    assert limited(staleness) == (free(staleness) if staleness <= staleness_max else None)
    assert limited(staleness_max) is not None
    assert limited(staleness_max + 1) is None
