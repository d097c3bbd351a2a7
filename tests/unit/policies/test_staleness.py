import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.kinds import StalenessKind
from edgeasync.policies.staleness import AdaptiveLearningRate, ConstantStaleness, PolynomialStaleness, Staleness

HUGE = 2**53
AMOUNTS = st.integers(0, HUGE)
LIMITS = st.none() | st.floats(0.0, 1e6)

WEIGHTS = {
    ConstantStaleness: st.fixed_dictionaries({}),
    AdaptiveLearningRate: st.fixed_dictionaries({"factor": st.floats(0.0, 1.0, exclude_min=True)}),
    PolynomialStaleness: st.fixed_dictionaries({"exponent": st.floats(0.0, 10.0)}),
}


def test_every_kind_is_drawn():
    assert set(WEIGHTS) == set(get_args(StalenessKind))


@st.composite
def policies(draw, **settings):
    """Draw any policy, with what it takes within its bounds."""
    kind = draw(st.sampled_from(list(WEIGHTS)))
    return kind(**(draw(WEIGHTS[kind]) | {name: draw(value) for name, value in settings.items()}))


@pytest.mark.parametrize(
    ("policy", "amount", "weight"),
    [
        (ConstantStaleness(), HUGE, 1.0),
        (ConstantStaleness(staleness_max=7), 7, 1.0),
        (ConstantStaleness(staleness_max=7), 8, None),
        (ConstantStaleness(staleness_max=0), 1, None),
        (AdaptiveLearningRate(), 2, 0.81),
        (AdaptiveLearningRate(factor=0.5), 3, 0.125),
        (AdaptiveLearningRate(staleness_max=2), 3, None),
        (PolynomialStaleness(), 3, 0.5),
        (PolynomialStaleness(), 99, 0.1),
        (PolynomialStaleness(exponent=2.0), 9, 0.01),
        (PolynomialStaleness(staleness_max=2.5), 3, None),
    ],
)
def test_weights_by_hand(policy, amount, weight):
    told = policy(Staleness(amount, devices_live=3))
    assert told == (weight if weight is None else pytest.approx(weight, rel=1e-12))


@given(policies(), AMOUNTS, AMOUNTS)
def test_older_never_counts_more(policy, one, other):
    newer, older = [policy(Staleness(amount)) or 0.0 for amount in sorted((one, other))]
    assert 0.0 <= older <= newer <= policy(Staleness(0)) == 1.0
    assert math.isfinite(older)


@given(policies(), st.floats(0.0, 1e6), AMOUNTS)
def test_the_limit_is_the_last_that_counts(free, staleness_max, amount):
    settings = {name: getattr(free, name) for name in free.__struct_fields__}
    limited = type(free)(**settings | {"staleness_max": staleness_max})
    staleness = Staleness(amount)
    assert limited(staleness) == (free(staleness) if amount <= staleness_max else None)
    assert limited(Staleness(math.floor(staleness_max))) is not None
    assert limited(Staleness(math.floor(staleness_max) + 1)) is None


@given(policies(staleness_max=LIMITS), AMOUNTS, st.integers(0, 1000))
def test_only_versions_count(policy, amount, devices_live):
    assert policy(Staleness(amount)) == policy(Staleness(amount, devices_live))
