"""The model's arithmetic against plain numpy, to the bit, and the life of its buffers."""

import gc
import math

import numpy as np
import pytest

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN
from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.hub_model import CHUNK, DECODED_BYTES_MAX, HubModel, WaitingUpdate
from edgeasync.core.hub.effects import Fold
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.codecs import make_codec
from tests.support.codecs.coded import coded, flat

F = np.float32
LENGTHS = [1, 2, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 4097]


def make_spec(trained, statistics=0):
    parameters = [Parameter("weights", (trained,))]
    if statistics:
        parameters.append(Parameter("running_mean", (statistics,), "statistic"))
    return ParameterSpec(tuple(parameters))


def by(optimizer, **parts):
    """A policy with this optimizer."""
    return Policy(optimizer=tuple(optimizer), **parts)


def waiting(update):
    return WaitingUpdate(update, "identity", b"")


def advance(model, weights, updates):
    plan = plan_chain(model.optimizer, Conditions(1.0, model.current.number))
    handles = tuple(model.keep(waiting(update)) for update in updates)
    fold = Fold(model.current.number + 1, handles, tuple(weights), plan)
    model.advance(model.fold(fold, [model.release(handle) for handle in handles])[0])
    return model.current.vector


def bits(vector):
    return np.asarray(vector, F).view(np.uint32)


# -- folds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_fold_is_the_plain_formula_to_the_bit(length, codec):
    generator = np.random.default_rng(length)
    initial = generator.standard_normal(length).astype(F)
    deltas = generator.standard_normal((3, length)).astype(F)
    weights, learning_rate = (1.0, 0.7071067811865476, 0.3), 0.3
    model = HubModel(make_spec(length), initial, 0, by([SGD(learning_rate=learning_rate)]))
    result = advance(model, weights, [coded(delta, codec) for delta in deltas])
    sent = deltas.astype(np.float16).astype(F) if codec == "float16" else deltas
    expected = sent[0] * F(weights[0] * learning_rate)
    for delta, weight in zip(sent[1:], weights[1:], strict=True):
        expected = expected + delta * F(weight * learning_rate)
    np.testing.assert_array_equal(bits(result), bits(initial + expected))


@pytest.mark.parametrize("length", [3, CHUNK + 1])
def test_momentum_lives_through_many_folds_to_the_bit(length):
    generator = np.random.default_rng(length)
    model = HubModel(
        make_spec(length), np.zeros(length, F), 7, by([SGD(0.5), SGD(learning_rate=0.25, momentum=0.9)])
    )
    parameters, velocity = np.zeros(length, F), np.zeros(length, F)
    for number in range(8, 24):
        deltas = generator.standard_normal((2, length)).astype(F)
        weights = (1.0, 0.6)
        result = advance(model, weights, [coded(delta) for delta in deltas])
        gradient = deltas[0] * F(-0.5 * weights[0]) + deltas[1] * F(-0.5 * weights[1])
        velocity = velocity * F(0.9) + gradient
        parameters = parameters - velocity * F(0.25)
        assert model.current.number == number
        np.testing.assert_array_equal(bits(result), bits(parameters))


@pytest.mark.parametrize("weights", [(0.5,), (1.0,), (0.2, 0.3), (1.0, 1.0), (1.0, 0.5, 0.25)])
@pytest.mark.parametrize(("trained", "statistics"), [(3, 2), (CHUNK - 1, CHUNK + 2)])
def test_statistics_are_merged_convexly_and_never_optimized(weights, trained, statistics):
    generator = np.random.default_rng(trained)
    initial = generator.standard_normal(trained + statistics).astype(F)
    held = generator.standard_normal((len(weights), trained + statistics)).astype(F)
    optimizer = [SGD(learning_rate=0.01, momentum=0.9)]
    model = HubModel(make_spec(trained, statistics), initial, 0, by(optimizer))
    alone = HubModel(make_spec(trained), initial[:trained], 0, by(optimizer))
    result = initial
    for _ in range(3):
        before = result
        sent = held.copy()  # differences of what is trained, statistics as they are
        sent[:, :trained] -= before[:trained]
        result = advance(model, weights, [coded(row) for row in sent])
        trained_alone = advance(alone, weights, [coded(row[:trained]) for row in sent])
        np.testing.assert_array_equal(bits(result[:trained]), bits(trained_alone))
        total = max(1.0, sum(weights))
        expected = (1 - sum(weights) / total) * before + sum(
            weight / total * values for weight, values in zip(weights, held.astype(np.float64), strict=True)
        )
        np.testing.assert_allclose(result[trained:], expected[trained:], rtol=1e-5, atol=1e-6)
        candidates = np.vstack([held, before])[:, trained:]
        assert (result[trained:] <= candidates.max(axis=0) + 1e-5).all()
        assert (result[trained:] >= candidates.min(axis=0) - 1e-5).all()


def test_versions_follow_one_another():
    model = HubModel(make_spec(3), np.zeros(3, F), 4, by([SGD()]))
    for number in (4, 6):
        with pytest.raises(ValueError, match=f"fold {number} must follow version {number - 1}, not 4"):
            model.fold(Fold(number, (0,), (1.0,), ((1.0, 0.0),)), [coded(np.ones(3))])


# -- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_the_norm_is_numpys(length):
    values = np.random.default_rng(length).standard_normal(length).astype(F)
    expected = np.linalg.norm(values.astype(np.float64))
    assert norm_of(coded(values)) == pytest.approx(expected, rel=1e-6)
    halved = values.astype(np.float16).astype(np.float64)
    assert norm_of(coded(values, "float16")) == pytest.approx(np.linalg.norm(halved), rel=1e-6)
    assert norm_of(coded(np.zeros(length))) == 0.0


@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [1, 4096, CHUNK + 4099])
def test_what_is_not_finite_is_found_anywhere(length, value, codec):
    for place in sorted({0, length // 2, min(length, 4096) - 1, min(length, CHUNK) - 1, length - 1}):
        values = np.ones(length, F)
        values[place] = value
        assert not math.isfinite(norm_of(coded(values, codec))), place
    values = np.full(length, np.inf, F)
    values[::2] = -np.inf
    values[0] = value
    assert not math.isfinite(norm_of(coded(values, codec)))


@pytest.mark.parametrize("length", [1, 4096, CHUNK + 4099])
@pytest.mark.parametrize("value", [2e19, -1e30, 3.4e38])
def test_values_whose_squares_overflow_count_as_not_finite(length, value):
    """A model that such an update went into would soon not be finite either."""
    values = np.zeros(length, F)
    values[-1] = value
    assert not math.isfinite(norm_of(coded(values)))


@pytest.mark.parametrize(("codec", "pattern"), [("identity", b"\x01\x00\x80\x7f"), ("float16", b"\x01\x7c")])
@pytest.mark.parametrize("length", [1, 4096])
def test_a_signalling_nan_is_found_without_a_signal(codec, pattern, length):
    assert math.isnan(norm_of(make_codec(codec, flat(length)).open(pattern * length)))


def test_float16_that_overflowed_on_the_device_is_found():
    assert norm_of(coded([70000.0, 1.0], "float16")) == math.inf


# -- snapshots and their memory ------------------------------------------------------------------------------

LARGE = POOLED_BYTES_MIN // 4


@pytest.mark.parametrize("length", [3, LARGE - 1, LARGE, CHUNK + 1])
def test_snapshots_never_change(length):
    model = HubModel(make_spec(length), np.zeros(length, F), 0, by([SGD(momentum=0.5)]))
    held = [(model.current, model.current.vector.copy())]
    for _ in range(6):
        advance(model, [1.0], [coded(np.ones(length))])
        held.append((model.current, model.current.vector.copy()))
        del held[1:3:2]
    for snapshot, copy in held:
        np.testing.assert_array_equal(snapshot.vector, copy)
        with pytest.raises(ValueError, match="read-only"):
            snapshot.vector[0] = 1.0


@pytest.mark.parametrize("codec", ["identity", "float16"])
def test_a_coded_snapshot_is_made_once_and_keeps_its_bytes(codec):
    model = HubModel(make_spec(LARGE), np.arange(LARGE, dtype=F) / LARGE, 0, by([SGD()]))
    payload, checksum = model.current.payload(make_codec(codec, model.spec))
    assert model.current.payload(make_codec(codec, model.spec))[0] is payload
    assert model.current.payload(make_codec(codec, model.spec))[1] == checksum
    before = bytes(payload)
    for _ in range(4):
        advance(model, [1.0], [coded(np.ones(LARGE))])
    assert bytes(payload) == before
    assert bytes(model.current.payload(make_codec(codec, model.spec))[0]) != before


def test_buffers_come_back_when_nothing_refers_to_them():
    gc.disable()
    try:
        model = HubModel(make_spec(LARGE), np.zeros(LARGE, F), 0, by([SGD()]))
        delta = coded(np.ones(LARGE))
        assert model.snapshots_alive == 1
        for _ in range(5):
            advance(model, [1.0], [delta])
            assert model.snapshots_alive == 1

        payload = model.current.payload(make_codec("identity", model.spec))[0]
        part = memoryview(payload)[4096:8192]
        snapshot = model.current
        advance(model, [1.0], [delta])
        assert model.snapshots_alive == 2
        del snapshot
        assert model.snapshots_alive == 2
        del payload
        advance(model, [1.0], [delta])
        assert model.snapshots_alive == 2
        assert np.frombuffer(part, F)[0] == 5.0
        del part
        assert model.snapshots_alive == 1

        view = model.current.vector[10:20]
        model.current.payload(make_codec("float16", model.spec))
        advance(model, [1.0], [delta])
        assert model.snapshots_alive == 2
        assert view[0] == 7.0
        del view
        assert model.snapshots_alive == 1
    finally:
        gc.enable()


def test_a_failed_fold_loses_no_buffer():
    class Broken:
        length = LARGE

        def read(self, *_):
            raise ValueError("broken")

    model = HubModel(make_spec(LARGE), np.zeros(LARGE, F), 0, by([SGD()]))
    with pytest.raises(ValueError, match="broken"):
        model.fold(Fold(1, (0,), (1.0,), ((1.0, 0.0),)), [Broken()])
    assert model.snapshots_alive == 1


@pytest.mark.parametrize("codec", ["float16", "int8", "top_k(0.25)+int4", "sign"])
@pytest.mark.parametrize("length", [1, 4095, CHUNK + 1, 2 * CHUNK + 4097])
def test_an_update_that_is_decoded_once_folds_to_the_same_bits(length, codec):
    models = [HubModel(flat(length), np.ones(length, F), 0, by([SGD(momentum=0.5)])) for _ in range(2)]
    sources = [coded(np.random.default_rng(seed).standard_normal(length), codec) for seed in range(3)]
    measured, norms = zip(*map(models[0].measure, sources), strict=True)
    assert list(norms) == [models[1].norm(source) for source in sources]
    found = [
        advance(model, [0.5, 0.2, 0.3], updates)
        for model, updates in zip(models, (measured, sources), strict=True)
    ]
    np.testing.assert_array_equal(*map(bits, found))


def test_a_few_updates_are_kept_decoded_until_they_are_folded():
    model = HubModel(make_spec(LARGE), np.zeros(LARGE, F), 0, by([SGD()]))
    source, plain = coded(np.ones(LARGE), "float16"), coded(np.ones(LARGE))
    assert model.measure(plain)[0] is plain  # its values are the payload itself
    room = DECODED_BYTES_MAX // model.spec.nbytes
    kept = [model.measure(source)[0] for _ in range(room + 1)]
    assert [update is source for update in kept] == [False] * room + [True]
    advance(model, [1.0], [kept.pop(0)])
    assert model.measure(source)[0] is not source


def test_a_decoded_update_that_is_too_large_is_not_kept():
    length = DECODED_BYTES_MAX // 4 + 1
    source = coded(np.ones(length), "float16")
    assert HubModel(make_spec(length), np.zeros(length, F), 0, by([SGD()])).measure(source)[0] is source
