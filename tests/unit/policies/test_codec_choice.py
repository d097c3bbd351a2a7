import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.codec_choice import (
    HYSTERESIS,
    LADDER,
    MODEL_LADDER,
    STEPS,
    UPLOAD_SHARE_MAX,
    choose_codec,
)

NAMES = [rung.codec for rung in LADDER]
COARSE = NAMES[1]
MILLION = 1_000_000


def choose(current="int8", *, ladder=LADDER, known=NAMES, values=MILLION, mbit=0.0, step_s=1.0):
    return choose_codec(
        ladder,
        current,
        values=values,
        known=known,
        bandwidth_bytes_per_s=mbit * 125_000,
        step_s=step_s,
    )


@pytest.mark.parametrize(("mbit", "codec"), [(0.1, COARSE), (8, COARSE), (11, "int8"), (10_000, "int8")])
def test_the_finest_codec_that_the_link_bears(mbit, codec):
    """A million values, and a second a step: 0.8 s are little for the upload."""
    assert choose("int8", mbit=mbit) == codec


def test_what_is_not_measured_is_taken_for_usual():
    assert choose("", mbit=0.0) == "int8"
    assert choose("", mbit=1.0, step_s=0.0) == "int8"


def test_on_a_fast_link_a_byte_a_value_is_coarse_enough():
    assert choose("int8", mbit=79, values=100 * MILLION) == COARSE
    assert choose("int8", mbit=81, values=100 * MILLION) == "int8"


def test_a_tiny_update_is_not_coded():
    assert choose("", values=1024) == "identity"
    assert choose("", values=1025) == "int8"


def test_only_what_the_device_knows_is_chosen():
    assert choose(known=["identity"], mbit=0.1) == "identity"
    assert choose(known=[], mbit=0.0) == "identity"
    assert choose(known=["identity", COARSE], mbit=1000) == COARSE


def test_whole_models_are_never_sent_coarsely():
    for mbit in (0, 0.1, 10, 1e4):
        assert choose(ladder=MODEL_LADDER, known=["identity", "float16"], mbit=mbit) == "float16"


@given(st.floats(0.01, 1e5), st.sampled_from(NAMES), st.integers(1100, 10**8))
def test_a_steady_link_settles_at_once(mbit, current, values):
    first = choose(current, mbit=mbit, values=values)
    assert choose(first, mbit=mbit, values=values) == first


def test_a_finer_codec_must_fit_well():
    upload_s = 1.02 * MILLION / 125_000  # at 1 Mbit/s, as int8
    edge = upload_s / (UPLOAD_SHARE_MAX * STEPS * 1.0)
    assert choose("int8", mbit=1.01 * edge) == "int8"
    assert choose(COARSE, mbit=1.01 * edge) == COARSE
    assert choose(COARSE, mbit=1.01 * edge / HYSTERESIS) == "int8"
