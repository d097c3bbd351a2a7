"""Two hostile keys of ten: they ruin no model, the hub warns of them, and no honest device loses an update.

`python -m benchmarks.security_poison` has all attacks, claims and seeds; here are the strongest.
"""

import pytest

from benchmarks.security_poison_fleet import POLICIES, Case, measure
from edgeasync.core.hub import member
from edgeasync.core.hub.reported_stats import clamp
from tests.support.simulation.harness import run

UPDATES = 300
ACCURACY_MIN = 0.85
WARNED_WITHIN = 30


def assert_well(outcome):
    assert outcome.accuracy >= ACCURACY_MIN
    assert (outcome.refused, outcome.rollbacks) == (0.0, 0)


@pytest.mark.parametrize(
    ("trust", "attack", "claims", "loud"),
    [
        ("admitted", "x100", "good", True),
        ("admitted", "x1e6", "alone", False),
        ("admitted", "x7", "true", True),
        ("admitted", "NaN", "bad", True),
        ("open", "flip", "true", False),
        ("open", "x100", "true", True),
        ("open", "drift", "good", False),
    ],
)
def test_two_hostile_keys_of_ten_do_not_ruin_the_model(trust, attack, claims, loud):
    outcome = measure(Case(POLICIES[trust], 1, attack, claims, updates=UPDATES))
    assert_well(outcome)
    assert outcome.honest_warned == 0
    if loud:
        assert outcome.first
        assert outcome.warned <= WARNED_WITHIN


def test_the_order_that_the_warning_proposes_makes_the_fleet_as_good_as_a_clean_one():
    clean = measure(Case(POLICIES["admitted"], 1, updates=UPDATES))
    assert_well(clean)
    assert (clean.accuracy >= 0.93, clean.honest_warned) == (True, 0)
    obeyed = measure(Case(POLICIES["admitted"], 1, "x100", obeys=True, updates=UPDATES))
    assert_well(obeyed)
    assert obeyed.accuracy >= clean.accuracy - 0.02


def test_two_keys_under_ten_names_each_are_two_keys():
    names = {count: measure(Case(POLICIES["open"], 1, "flip", names=count, updates=UPDATES)) for count in (1, 10)}
    assert_well(names[10])
    assert names[10].accuracy >= names[1].accuracy - 0.03


def test_no_honest_device_is_clamped_whatever_dies(monkeypatch):
    """Crashes, partitions, backups that are put back, repeated and late answers, steps that overlap."""
    clamped, held = [], []

    def watch(push, **known):
        claims = clamp(push, **known)
        held.append(push)
        names = ("local_steps", "overlap_steps", "examples", "step_s", "loss_mean")
        clamped.extend(
            (name, push, claims, known) for name in names if getattr(claims, name) != getattr(push, name)
        )
        return claims

    monkeypatch.setattr(member, "clamp", watch)
    for seed in range(10):
        assert not run(seed).failure
    assert clamped == []
    assert len(held) > 200
