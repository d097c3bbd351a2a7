"""Two hostile keys of ten: what they send and say ruins no model, and costs no honest device its updates.

`python -m benchmarks.security_poison` has all attacks, claims and seeds; here are the strongest.
"""

import pytest

from benchmarks.security_poison_fleet import POLICIES, Case, measure
from edgeasync.core.hub import membership
from edgeasync.core.hub.claims import hold
from edgeasync.policies.policy import Policy
from tests.support.harness import run

UPDATES = 300
ACCURACY_MIN = 0.85


def assert_well(outcome):
    assert outcome.accuracy >= ACCURACY_MIN
    assert (outcome.quarantined, outcome.rollbacks) == (0, 0)
    assert outcome.refused <= 0.02


@pytest.mark.parametrize(
    ("policy", "attack", "claims"),
    [
        ("default", "x100", "good"),
        ("default", "x1e6", "alone"),
        ("default", "x7", "alone"),
        ("default", "NaN", "bad"),
        ("robust", "flip", "true"),
        ("robust", "drift", "good"),
    ],
)
def test_two_hostile_keys_of_ten_do_not_ruin_the_model(policy, attack, claims):
    assert_well(measure(Case(POLICIES[policy], 1, attack, claims, updates=UPDATES)))


def test_two_keys_under_ten_names_each_are_two_keys():
    names = {
        count: measure(Case(POLICIES["robust"], 1, "flip", names=count, updates=UPDATES)) for count in (1, 10)
    }
    assert_well(names[10])
    assert names[10].accuracy >= names[1].accuracy - 0.03


def test_a_fleet_without_hostile_keys_is_left_alone():
    outcome = measure(Case(Policy(), 1, updates=UPDATES))
    assert_well(outcome)
    assert (outcome.accuracy >= 0.93, outcome.refused) == (True, 0.0)


def test_no_honest_device_is_clamped_whatever_dies(monkeypatch):
    """Crashes, partitions, backups that are put back, repeated and late answers, steps that overlap."""
    clamped, held = [], []

    def watch(push, **known):
        claims = hold(push, **known)
        held.append(push)
        names = ("local_steps", "overlap_steps", "examples", "step_s", "loss_mean")
        clamped.extend(
            (name, push, claims, known) for name in names if getattr(claims, name) != getattr(push, name)
        )
        return claims

    monkeypatch.setattr(membership, "hold", watch)
    for seed in range(10):
        assert not run(seed).failure
    assert clamped == []
    assert len(held) > 200
