"""The arithmetic of a round of peers: all have one mean, to the bit, and nothing of a payload is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.core.arrays.peer_round import NotFiniteError, PeerRound, check_peer_codec
from edgeasync.core.peer.plan import plan_round

RANDOM = np.random.default_rng(0)
CODECS = ["identity", "float16", "bfloat16", "int8", "int8(stochastic)", "int4"]
TOPOLOGIES = ["ring", "all_to_all"]


def average(models, topology, codec):
    """Carry out a round as its members do, step by step; return what each applies to its model."""
    names = tuple(f"{number:02}" for number in range(len(models)))
    plans = [plan_round(topology, names, name) for name in names]
    segments = plans[0].segments
    rounds = [
        PeerRound(model, segments, len(models), codec, ring=topology == "ring", trained_length=len(model))
        for model in models
    ]
    payloads = {}
    for step in range(max(len(plan.incoming) for plan in plans)):
        for name, plan, of in zip(names, plans, rounds, strict=True):
            for outgoing in plan.outgoing:
                if outgoing.step == step and outgoing.source != "forward":
                    payloads[name, step] = bytes(of.encode(outgoing.segment, outgoing.source, RANDOM))
                elif outgoing.step == step:
                    sender = names[names.index(name) - 1]
                    payloads[name, step] = payloads[sender, outgoing.step - 1]
        for name, plan, of in zip(names, plans, rounds, strict=True):
            (incoming,) = [each for each in plan.incoming if each.step == step]
            sender = name if incoming.own else incoming.sender
            assert of.decode(payloads[sender, step], incoming.segment, incoming.way)
    found = [model.copy() for model in models]
    for of, model in zip(rounds, found, strict=True):
        of.apply(model)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("codec", CODECS)
@given(members=st.integers(2, 9), length=st.integers(1, 700), seed=st.integers(0, 99))
def test_all_members_have_the_mean(topology, codec, members, length, seed):
    models = list(np.random.default_rng(seed).normal(size=(members, length)).astype(np.float32))
    found = average(models, topology, codec)
    exact = np.mean(models, axis=0, dtype=np.float64)
    error = {
        "identity": 1e-6,
        "float16": 1e-2,
        "bfloat16": 1e-1,
        "int8": 0.2,
        "int8(stochastic)": 0.4,
        "int4": 4.0,
    }
    assert np.abs(np.array(found) - exact).max() < error[codec]
    assert np.ptp(found, axis=0).max() < 1e-6


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_was_learnt_since_the_snapshot_is_kept_and_statistics_are_the_mean(topology):
    ring = topology == "ring"
    before, other = np.array([1.0, 2.0, 3.0], np.float32), np.array([3.0, 2.0, 1.0], np.float32)
    of = PeerRound(before, 1, 2, "identity", ring=ring, trained_length=2)
    if ring:
        assert of.decode(((before + other) / 2).tobytes(), 0, "replace")
    else:
        assert of.decode(before.tobytes(), 0, "add")
        assert of.decode(other.tobytes(), 0, "add")
    now = before + np.array([0.5, 0.25, 7.0], np.float32)
    of.apply(now)
    assert now.tolist() == [2.5, 2.25, 2.0]


def test_a_model_that_has_diverged_since_becomes_the_mean():
    of = PeerRound(np.zeros(2, np.float32), 1, 2, "identity", ring=True, trained_length=2)
    assert of.decode(np.ones(2, np.float32).tobytes(), 0, "replace")
    now = np.array([np.nan, np.inf], np.float32)
    of.apply(now)
    assert now.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", ["add", "replace"])
def test_a_payload_that_is_not_finite_is_refused(value, way):
    of = PeerRound(np.zeros(3, np.float32), 1, 2, "identity", ring=True, trained_length=3)
    assert of.decode(np.array([0, value, 0], np.float32).tobytes(), 0, way) is None


@pytest.mark.parametrize("codec", CODECS)
@given(payload=st.binary(max_size=700))
def test_whatever_a_payload_is_it_is_refused_or_finite(codec, payload):
    of = PeerRound(np.zeros(100, np.float32), 1, 2, codec, ring=True, trained_length=100)
    if of.decode(payload, 0, "replace") is not None:
        of.apply(model := np.zeros(100, np.float32))
        assert np.isfinite(model).all()


def test_a_sum_that_is_too_large_is_told_of_and_changes_nothing():
    huge = np.full(4, 3e38, np.float32)
    of = PeerRound(np.zeros(4, np.float32), 1, 2, "identity", ring=False, trained_length=4)
    for _ in range(2):
        assert of.decode(huge.tobytes(), 0, "add")
    model = np.ones(4, np.float32)
    with pytest.raises(NotFiniteError):
        of.apply(model)
    assert (model == 1.0).all()
    with pytest.raises(NotFiniteError):
        PeerRound(np.full(4, 1e6, np.float32), 1, 2, "float16", ring=True, trained_length=4).encode(
            0, "sum", RANDOM
        )


def test_what_is_sent_does_not_change_with_the_sum():
    of = PeerRound(np.zeros(4, np.float32), 2, 2, "identity", ring=True, trained_length=4)
    payload = of.encode(0, "sum", RANDOM)
    assert of.decode(np.ones(2, np.float32).tobytes(), 0, "replace")
    assert bytes(payload) == bytes(8)


@pytest.mark.parametrize("codec", ["top_k(0.1)", "sign", "top_k(0.1)+int8", "what"])
def test_codecs_that_drop_most_of_a_model_are_refused(codec):
    with pytest.raises(ValueError, match="codec"):
        check_peer_codec(codec)


@pytest.mark.parametrize("codec", CODECS)
@given(length=st.integers(1, 300), trained=st.integers(0, 300), parts=st.integers(1, 5), seed=st.integers(0, 99))
def test_norms_are_those_of_the_decoded_trained_values_and_statistics(codec, length, trained, parts, seed):
    model = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    trained = min(trained, length)
    of = PeerRound(model, parts, 2, codec, ring=True, trained_length=trained)
    found = [of.decode(of.encode(part, "snapshot", RANDOM), part, "replace") for part in range(parts)]
    mean = of._sum
    expected = [np.linalg.norm(mean[:trained]), np.linalg.norm(mean[trained:])]
    assert np.linalg.norm(found, axis=0) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    own = [np.linalg.norm(model[:trained]), np.linalg.norm(model[trained:])]
    assert of.norms == pytest.approx(own, rel=1e-5)


def test_a_payload_too_long_to_measure_has_an_infinite_norm():
    of = PeerRound(np.zeros(3, np.float32), 1, 2, "identity", ring=True, trained_length=2)
    assert of.decode(np.float32([3e38, 1, 3e38]).tobytes(), 0, "add") == (np.inf, np.inf)


@pytest.mark.parametrize("place", [0, 2], ids=["trained", "statistics"])
@pytest.mark.parametrize("value", [3e19, 3e38, np.inf, np.nan])
def test_a_model_too_long_to_measure_is_in_no_round(value, place):
    """Its norm would be infinite, and so would be the bound on what the others send."""
    model = np.zeros(3, np.float32)
    model[place] = value
    with pytest.raises(NotFiniteError, match="diverged"):
        PeerRound(model, 1, 2, "identity", ring=True, trained_length=2)
