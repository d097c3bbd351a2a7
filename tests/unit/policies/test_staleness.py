import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.policies.kinds import StalenessKind
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import (
    AdaptiveLearningRate,
    BoundedStaleness,
    ConstantStaleness,
    HingeStaleness,
    PolynomialStaleness,
    RingmasterStaleness,
    Staleness,
)

HUGE = 2**53
UNITS = st.sampled_from(["versions", "seconds"])
AMOUNTS = st.integers(0, HUGE) | st.floats(0.0, 1e300)
LIMITS = st.none() | st.floats(0.0, 1e6)

WEIGHTS = {
    ConstantStaleness: st.fixed_dictionaries({}),
    AdaptiveLearningRate: st.fixed_dictionaries({"factor": st.floats(0.0, 1.0, exclude_min=True)}),
    PolynomialStaleness: st.fixed_dictionaries({"exponent": st.floats(0.0, 10.0)}),
    HingeStaleness: st.fixed_dictionaries({"free": st.floats(0.0, 1e9), "slope": st.floats(0.0, 1e6)}),
    BoundedStaleness: st.just({"staleness_max": 5e299}),
}


def test_every_kind_is_drawn():
    assert {*WEIGHTS, RingmasterStaleness} == set(get_args(StalenessKind))


@st.composite
def policies(draw, **settings):
    """Draw any policy that counts in either unit, with what it takes within its bounds."""
    kind = draw(st.sampled_from(list(WEIGHTS)))
    return kind(**(draw(WEIGHTS[kind]) | {name: draw(value) for name, value in settings.items()}))


def aged(policy, amount):
    """Return staleness of `amount` in the policy's unit, and none in the other."""
    versions = policy.unit == "versions"
    return Staleness(int(amount)) if versions else Staleness(0, seconds=float(amount))


@pytest.mark.parametrize(
    ("policy", "amount", "weight"),
    [
        (ConstantStaleness(), 0, 1.0),
        (ConstantStaleness(), HUGE, 1.0),
        (AdaptiveLearningRate(), 0, 1.0),
        (AdaptiveLearningRate(), 1, 0.9),
        (AdaptiveLearningRate(), 2, 0.81),
        (AdaptiveLearningRate(factor=0.5), 3, 0.125),
        (AdaptiveLearningRate(factor=1.0), 1000, 1.0),
        (AdaptiveLearningRate(), HUGE, 0.0),
        (PolynomialStaleness(exponent=0.0), 1000, 1.0),
        (PolynomialStaleness(), 0, 1.0),
        (PolynomialStaleness(), 3, 0.5),
        (PolynomialStaleness(), 8, 1 / 3),
        (PolynomialStaleness(), 99, 0.1),
        (PolynomialStaleness(exponent=1.0), 4, 0.2),
        (PolynomialStaleness(exponent=2.0), 9, 0.01),
        (PolynomialStaleness(exponent=10.0), 1, 2**-10),
        (HingeStaleness(), 0, 1.0),
        (HingeStaleness(), 4, 1.0),
        (HingeStaleness(), 5, 1 / 11),
        (HingeStaleness(), 14, 1 / 101),
        (HingeStaleness(free=0.0, slope=1.0), 1, 0.5),
        (HingeStaleness(free=2.0, slope=0.5), 4, 0.5),
        (HingeStaleness(slope=0.0), HUGE, 1.0),
        (BoundedStaleness(staleness_max=3), 0, 1.0),
        (BoundedStaleness(staleness_max=3), 3, 1.0),
        (BoundedStaleness(staleness_max=3), 4, None),
        (BoundedStaleness(staleness_max=0), 1, None),
        (ConstantStaleness(staleness_max=7), 7, 1.0),
        (ConstantStaleness(staleness_max=7), 8, None),
        (HingeStaleness(staleness_max=5), 5, 1 / 11),
        (HingeStaleness(staleness_max=5), 6, None),
    ],
)
def test_weights_by_hand(policy, amount, weight):
    told = policy(Staleness(amount, seconds=1e9, devices_live=3))
    assert told == (weight if weight is None else pytest.approx(weight, rel=1e-12))


@pytest.mark.parametrize(
    ("policy", "seconds", "weight"),
    [
        (AdaptiveLearningRate(factor=0.25, unit="seconds"), 0.5, 0.5),
        (PolynomialStaleness(unit="seconds"), 1.25, 2 / 3),
        (HingeStaleness(free=0.5, slope=2.0, unit="seconds"), 0.75, 2 / 3),
        (BoundedStaleness(staleness_max=1.5, unit="seconds"), 1.5, 1.0),
        (BoundedStaleness(staleness_max=1.5, unit="seconds"), 1.51, None),
        (ConstantStaleness(staleness_max=60, unit="seconds"), 61.0, None),
    ],
)
def test_weights_in_seconds_by_hand(policy, seconds, weight):
    told = policy(Staleness(1000, seconds=seconds))
    assert told == (weight if weight is None else pytest.approx(weight, rel=1e-12))


@pytest.mark.parametrize(
    ("per_device", "devices_live", "threshold"),
    [(1.0, 8, 8), (1.0, 1, 1), (1.0, 0, 1), (2.0, 5, 10), (0.5, 5, 3), (0.01, 30, 1), (1.5, 3, 5)],
)
def test_ringmaster_refuses_from_its_threshold_on(per_device, devices_live, threshold):
    policy = RingmasterStaleness(per_device=per_device)
    weights = [policy(Staleness(versions, 1e9, devices_live)) for versions in range(threshold + 20)]
    assert weights == [1.0] * threshold + [None] * 20


@given(policies(unit=UNITS), AMOUNTS, AMOUNTS)
def test_older_never_counts_more(policy, one, other):
    newer, older = [policy(aged(policy, amount)) or 0.0 for amount in sorted((one, other))]
    assert 0.0 <= older <= newer <= policy(aged(policy, 0)) == 1.0
    assert math.isfinite(older)


@given(policies(unit=UNITS), st.floats(0.0, 1e6), AMOUNTS)
def test_the_limit_is_the_last_that_counts(free, staleness_max, amount):
    if isinstance(free, BoundedStaleness):
        free = ConstantStaleness(unit=free.unit)
    settings = {name: getattr(free, name) for name in free.__struct_fields__}
    limited = type(free)(**settings | {"staleness_max": staleness_max})
    staleness = aged(free, amount)
    measured = staleness.versions if free.unit == "versions" else staleness.seconds
    assert limited(staleness) == (free(staleness) if measured <= staleness_max else None)
    assert limited(aged(free, staleness_max)) is not None
    assert limited(aged(free, math.nextafter(staleness_max, math.inf) + 1)) is None


@given(policies(unit=UNITS, staleness_max=LIMITS), AMOUNTS, AMOUNTS, st.integers(0, 1000))
def test_only_its_own_unit_counts(policy, amount, other, devices_live):
    if policy.unit == "versions":
        one, two = Staleness(int(amount)), Staleness(int(amount), float(other), devices_live)
    else:
        one, two = Staleness(0, float(amount)), Staleness(int(other), float(amount), devices_live)
    assert policy(one) == policy(two)


@given(st.floats(0.0, 1e6, exclude_min=True), st.integers(0, 1000), st.integers(0, HUGE))
def test_ringmaster_lets_through_no_less_when_more_devices_live(per_device, devices_live, versions):
    policy = RingmasterStaleness(per_device=per_device)
    few, more = [policy(Staleness(versions, 0.0, live)) for live in (devices_live, devices_live + 1)]
    assert few is None or more == 1.0
    assert policy(Staleness(0, 0.0, devices_live)) == 1.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "bounded"}, "missing key `staleness_max`"),
        ({"kind": "bounded", "staleness_max": 5, "unit": "hours"}, "unit: invalid enum value 'hours'"),
        ({"kind": "adaptive_lr", "factor": 0}, "factor: expected `float` > 0.0"),
        ({"kind": "adaptive_lr", "factor": 1.5}, "factor: expected `float` <= 1.0"),
        ({"kind": "hinge", "free": -1}, "free: expected `float` >= 0.0"),
        ({"kind": "constant", "staleness_max": float("nan")}, "staleness_max: expected `float` >= 0.0"),
        ({"kind": "ringmaster", "per_device": 0}, "per_device: expected `float` > 0.0"),
        ({"kind": "ringmaster", "staleness_max": 3}, "unknown key `staleness_max`"),
    ],
)
def test_what_cannot_be_is_refused(table, message):
    with pytest.raises(ConfigError, match=r"^hub[.]toml: staleness") as caught:
        convert({"staleness": table}, Policy, where="hub.toml")
    assert message in str(caught.value)


def test_whole_numbers_will_do():
    policy = convert({"staleness": {"kind": "bounded", "staleness_max": 20}}, Policy, where="hub.toml")
    assert policy.staleness == BoundedStaleness(staleness_max=20.0)
