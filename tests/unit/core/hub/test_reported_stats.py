"""What a device says of an update, held against what the hub knows."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.core.hub.reported_stats import LOSS_MAX, VARIANCE_MAX, clamp
from edgeasync.protocol.messages import ModelVersion, Push

HONEST = Push(bytes(16), 1, ModelVersion("0" * 16, 3), 12, 384, 0.5, 0.1, 0.02, "identity", 0, 64, overlap_steps=4)
KNOWN = {"steps_max": 10, "overlap_steps_max": 4, "examples_told": 100, "cycle_s": 0.2, "slack_s": 15.0}
ANY = st.floats() | st.sampled_from([0.0, 5e-324, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan])


def held(known=KNOWN, **fields):
    return clamp(msgspec.structs.replace(HONEST, **fields), **known)


def test_what_an_honest_device_says_is_not_touched():
    claims = held()
    for name in ("local_steps", "overlap_steps", "examples", "step_s", "loss_mean", "loss_variance", "score"):
        assert getattr(claims, name) == getattr(HONEST, name)
    assert not claims.alone


@pytest.mark.parametrize(
    ("said", "held_to"),
    [
        ({"local_steps": 2**31}, {"local_steps": 14}),  # 10 that were assigned, and 4 before the assignment
        ({"local_steps": 2**31, "overlap_steps": 0, "examples": 2**53}, {"local_steps": 10, "examples": 4000}),
        ({"local_steps": 24, "overlap_steps": 4, "examples": 2400}, {"local_steps": 14, "examples": 1400}),
        ({"local_steps": 3, "overlap_steps": 9}, {"local_steps": 3, "overlap_steps": 3}),
        ({"local_steps": 1, "overlap_steps": 0}, {"local_steps": 1}),
        # Alone for a thousand steps: believed, and said, so that nobody compares its length.
        ({"local_steps": 1000, "overlap_steps": 1000}, {"local_steps": 1000, "alone": True}),
        ({"examples": 2**53}, {"examples": 12 * 400}),
        ({"step_s": 1e9}, {"step_s": (1.1 * 0.2 + 15.0) / 8}),
        ({"loss_mean": 1e300, "loss_variance": -1.0}, {"loss_mean": LOSS_MAX, "loss_variance": 0.0}),
        ({"loss_mean": -1e300, "loss_variance": 1e300}, {"loss_mean": -LOSS_MAX, "loss_variance": VARIANCE_MAX}),
        ({"score": -1e300}, {"score": -LOSS_MAX}),
        ({"loss_mean": math.inf, "loss_variance": None}, {"loss_mean": math.inf, "loss_variance": None}),
    ],
)
def test_what_cannot_be_true_is_clamped(said, held_to):
    claims = held(**said)
    assert {name: getattr(claims, name) for name in held_to} == held_to


def test_without_a_cycle_or_data_there_are_still_bounds():
    claims = held(KNOWN | {"cycle_s": None, "examples_told": 0}, step_s=1e9, examples=2**53)
    assert (claims.step_s, claims.examples) == (3600.0, 12 * 65_536)


@given(
    st.fixed_dictionaries(
        {
            "local_steps": st.integers(1, 2**31),
            "overlap_steps": st.integers(0, 2**31),
            "examples": st.integers(0, 2**53),
            "step_s": st.floats(0.0, 1e9),
            "loss_mean": st.none() | ANY,
            "loss_variance": st.none() | ANY,
            "score": st.none() | ANY,
        }
    ),
    st.integers(1, 2**31),
    st.sampled_from([None, 0.0, 1e-9, 1e12]),
)
def test_whatever_is_said_what_holds_is_within_bounds(said, steps_max, cycle_s):
    claims = held(KNOWN | {"steps_max": steps_max, "cycle_s": cycle_s}, **said)
    assert 1 <= claims.local_steps <= said["local_steps"]
    assert claims.local_steps - claims.overlap_steps <= steps_max
    assert 0 <= claims.examples <= said["examples"]
    assert 0.0 <= claims.step_s <= 3600.0
    for value, most in (
        (claims.loss_mean, LOSS_MAX),
        (claims.score, LOSS_MAX),
        (claims.loss_variance, VARIANCE_MAX),
    ):
        assert value is None or not math.isfinite(value) or abs(value) <= most
