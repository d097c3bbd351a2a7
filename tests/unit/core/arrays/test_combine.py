"""What becomes of several updates, carried through the model's own folds and held against plain numpy."""

import gc
import math

import numpy as np
import pytest

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN
from edgeasync.core.arrays.hub_model import CHUNK, HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    Contribution,
    Fleet,
    ImmediateAggregator,
    ModelAverageAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, MedianCombiner, TrimmedMeanCombiner
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD, Adam, ClipByGlobalNorm
from edgeasync.policies.policy import Policy
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.codecs import make_codec
from tests.support.codecs.coded import coded

F = np.float32
BUFFERED = BufferedAggregator()
QUIET = Monitor(detectors=())
LENGTHS = [1, 3, CHUNK, 2 * CHUNK + 77]
LARGE = POOLED_BYTES_MIN // 4


def make_model(initial, *, statistics=0, **parts):
    parameters = [Parameter("weights", (len(initial) - statistics,))]
    if statistics:
        parameters.append(Parameter("running_mean", (statistics,), "statistic"))
    policy = Policy(**{"aggregate": BUFFERED, "monitor": QUIET, "optimizer": (SGD(),)} | parts)
    return HubModel(ParameterSpec(tuple(parameters)), np.array(initial, F), 0, policy)


def fold(model, weights, rows, *, scale=1.0, count=None, codec="identity", grouped=(), norm_usual=math.inf):
    """Fold rows into the next version; return it and the norm that was measured."""
    number = model.current.number
    plan = plan_chain(model.optimizer, Conditions(1.0, number if count is None else count))
    handles = tuple(range(len(rows)))
    effect = Fold(number + 1, handles, tuple(weights), plan, scale, True, grouped, norm_usual)
    snapshot, norm = model.fold(effect, [coded(row, codec) for row in rows])
    model.advance(snapshot)
    return snapshot.vector, norm


def differences(rows, initial, statistics):
    """What rows add to a model: of the statistics, at their end, they hold values."""
    rows = np.array(rows, float)
    rows[..., -statistics:] -= np.asarray(initial, float)[-statistics:]
    return rows


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def contribution(number=0, weight=1.0):
    steps, voter = 8 * (number + 1), str(number)
    return Contribution(number, voter, weight, 1.0, 10 + number, steps, 0, 0.5, float(number), voter)


def contributions(count):
    return [contribution(number) for number in range(count)]


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize("length", LENGTHS)
def test_models_are_mixed_as_in_fedasync(length, codec):
    """x = (1 - a) x + a x_i, one after the other, and statistics likewise."""
    aggregator = ModelAverageAggregator(rate=0.6)
    expected = draw(length, length + 2)
    model = make_model(expected, statistics=2, aggregate=aggregator)
    for number, weight in enumerate((1.0, 0.5, 2**-0.5), start=1):
        told = draw(length + number, length + 2)
        (a,) = aggregator.weights([contribution(weight=weight)], Fleet(3))
        assert a == 0.6 * weight
        result, _ = fold(model, [a], [told], codec=codec)
        arrived = told.astype(np.float16).astype(float) if codec == "float16" else told
        expected = (1 - a) * expected + a * arrived
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


# -- combiners -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 5, 7])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("trim", [None, 0.1, 0.3])
def test_robust_combiners_go_through_a_fold(length, count, trim):
    rows = draw(count, count, length + 2)
    initial = draw(length, length + 2)
    weights = [0.5 ** (n % 2) / count for n in range(count)]
    combiner = MedianCombiner() if trim is None else TrimmedMeanCombiner(trim=trim)
    model = make_model(initial, statistics=2, combine=combiner, optimizer=(SGD(learning_rate=0.25),))
    result, _ = fold(model, weights, rows, scale=0.5)
    ranked = np.sort(differences(rows, initial, 2) * (np.array(weights) * count)[:, None], axis=0)
    left_out = (count - 1) // 2 if trim is None else min(math.ceil(trim * count), (count - 1) // 2)
    middle = ranked[left_out : count - left_out].mean(axis=0)
    middle[:-2] *= 0.125
    np.testing.assert_allclose(result, initial + middle, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_updates_of_one_row_are_added_up_before_they_are_ranked(length):
    """Rows 0 and 2 are one key's: its mean stands against the two others."""
    rows, initial = draw(length, 4, length + 2), draw(length + 1, length + 2)
    model = make_model(initial, statistics=2, combine=MedianCombiner())
    result, _ = fold(model, [1 / 6, 1 / 3, 1 / 6, 1 / 3], rows, grouped=(0, 1, 0, 2))
    told = differences(rows, initial, 2)
    middle = np.median([(told[0] + told[2]) / 2, told[1], told[3]], axis=0)
    np.testing.assert_allclose(result, initial + middle, rtol=1e-5, atol=1e-5)


# -- around a centre -------------------------------------------------------------------------------------------


def centred(rows, weights, centre, radius, momentum):
    """Karimireddy et al. 2021 in plain numpy: what is folded, and the next centre."""
    folded = np.zeros_like(centre)
    for row, weight in zip(rows.astype(float), weights, strict=True):
        apart = row - centre
        folded += weight * (centre + apart * min(1.0, radius / max(np.linalg.norm(apart), 1e-30)))
    return folded, momentum * centre + (1 - momentum) * folded / sum(weights)


@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_centred_clipping_is_that_of_the_paper(length, count, codec, momentum):
    """One by one, and several at once; some of them stale, one of them a thousand times too long."""
    aggregate = ImmediateAggregator() if count == 1 else BUFFERED
    combine = CentredClipCombiner(radius=0.8, momentum=momentum)
    optimizer = (SGD(learning_rate=0.5),)
    expected = draw(length, length).astype(float)
    model = make_model(expected, aggregate=aggregate, combine=combine, optimizer=optimizer)
    centre, usual = np.zeros(length), math.sqrt(length)
    for number in range(4):
        rows = draw(length + number, count, length)
        rows[number % count] *= 1000.0 if number % 2 else 1.0
        told = rows.astype(np.float16) if codec == "float16" else rows
        weights = [0.5 ** (n % 2) / count for n in range(count)]
        result, _ = fold(model, weights, rows, codec=codec, norm_usual=usual, scale=0.5)
        folded, centre = centred(told, weights, centre, 0.8 * usual, momentum)
        expected += 0.25 * folded
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5)


def test_without_a_usual_norm_centred_clipping_is_the_mean_and_a_rollback_clears_the_centre():
    model = make_model(np.zeros(3), combine=CentredClipCombiner(momentum=0.0), monitor=Monitor())
    rows = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    result, _ = fold(model, [0.5, 0.5], rows)
    assert result.tolist() == [2.0, 2.0, 2.0]
    assert model._state[-1].tolist() == [2.0, 2.0, 2.0]
    model.restore(2)
    assert not model._state[-1].any()


def test_statistics_of_an_update_far_from_the_centre_hardly_count():
    model = make_model(np.zeros(4), statistics=2, combine=CentredClipCombiner(radius=1.0))
    rows = np.array([[0.1, 0.1, 1.0, 1.0], [1e6, 0.0, 1e6, 1e6]])
    result, _ = fold(model, [0.5, 0.5], rows, norm_usual=0.2)
    assert result[-2:] == pytest.approx([0.6, 0.6], rel=1e-3)


def test_one_update_alone_is_what_it_is():
    model = make_model(np.zeros(4), combine=TrimmedMeanCombiner())
    result, _ = fold(model, [0.5], [np.array([2.0, -4.0, 0.0, 1.0])])
    assert result.tolist() == [1.0, -2.0, 0.0, 0.5]


# -- what is measured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        ((SGD(),), 1.0),
        ((SGD(learning_rate=0.25),), 0.5),
        ((SGD(learning_rate=0.25, momentum=0.9),), 0.5),
        ((ClipByGlobalNorm(norm=0.01), SGD(learning_rate=0.5), Adam()), 0.5),
        ((CosineSchedule(updates=10), SGD(momentum=0.9)), 1.0),
    ],
)
@pytest.mark.parametrize("length", [3, 2 * CHUNK + 77])
def test_the_norm_of_the_weighted_sum_is_measured_before_the_optimizer(length, optimizer, scale):
    model = make_model(np.ones(length + 2), statistics=2, optimizer=optimizer)
    rows, weights = draw(length, 3, length + 2), np.array([0.5, 0.25, 0.125])
    for _ in range(3):
        _, norm = fold(model, weights, rows, scale=scale)
        assert norm == pytest.approx(np.linalg.norm((weights @ rows.astype(float))[:-2]), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_learning_rate_that_has_run_out_is_survived(momentum):
    model = make_model(np.ones(3), optimizer=(CosineSchedule(updates=5), SGD(momentum=momentum)))
    result, norm = fold(model, [0.5, 0.5], draw(0, 2, 3), count=5)
    assert result.tolist() == [1.0, 1.0, 1.0]
    assert math.isnan(norm), "nothing is left to measure"


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        # Steps of -1/4 times the update, of which the scale leaves all, half and all.
        ((SGD(learning_rate=0.25),), [0.25, 0.375, 0.625]),
        # The velocity is not scaled: 1, 1.5, 1.75.
        ((SGD(learning_rate=0.25, momentum=0.5),), [0.25, 0.4375, 0.875]),
    ],
)
def test_what_alarms_leave_of_the_learning_rate_by_hand(optimizer, values):
    model = make_model(np.zeros(1), optimizer=optimizer)
    assert [fold(model, [1.0], [[1.0]], scale=scale)[0][0] for scale in (1.0, 0.5, 1.0)] == values


# -- versions to return to -----------------------------------------------------------------------------------


def restore(model):
    model.advance(model.restore(model.current.number + 1))
    return model.current


def test_the_older_of_two_kept_versions_comes_back_under_a_new_number():
    model = make_model(np.zeros(2), monitor=Monitor(), optimizer=(SGD(momentum=0.5),))
    model_values = []
    for number in range(6):
        if number in (2, 4, 5):
            model.keep_current()
        model_values.append(fold(model, [1.0], [[1.0, 0.0]])[0][0])
    assert model_values[:4] == [1.0, 2.5, 4.25, 6.125]
    # Kept at versions 2, 4 and 5, of which 4 is the older one that is left.
    kept = model_values[3]
    snapshot = restore(model)
    assert (snapshot.number, snapshot.vector[0]) == (7, kept)
    # The optimizer begins from scratch: without the velocity a step is the gradient alone.
    result, _ = fold(model, [1.0], [[1.0, 0.0]])
    assert (model.current.number, result[0]) == (8, kept + 1.0)
    # The version that was restored stays kept until there are two newer ones.
    model.keep_current()
    assert restore(model).vector[0] == kept
    model.keep_current()
    fold(model, [1.0], [[3.0, 0.0]])
    model.keep_current()
    model.keep_current()
    assert restore(model).vector[0] == kept + 3.0
    with pytest.raises(ValueError, match="must follow version"):
        model.fold(Fold(8, (), (), ()), [])


def test_before_anything_was_kept_the_first_version_comes_back():
    model = make_model(np.full(2, 7.0), monitor=Monitor())
    fold(model, [1.0], [[1.0, 1.0]])
    assert restore(model).vector.tolist() == [7.0, 7.0]
    with pytest.raises(ValueError, match="no version was kept for a rollback"):
        make_model(np.zeros(2)).restore(1)


def test_kept_versions_are_not_counted_as_being_sent():
    gc.disable()
    try:
        model = make_model(np.zeros(LARGE), monitor=Monitor())
        for number in range(1, 12):
            fold(model, [1.0], [np.ones(LARGE)])
            if number % 3 == 0:
                model.keep_current()
            assert model.snapshots_alive == 1
            assert model._pool.in_use <= 4
        sent = model.current.payload(make_codec("identity", model.spec))[0]
        fold(model, [1.0], [np.ones(LARGE)])
        fold(model, [1.0], [np.ones(LARGE)])
        assert model.snapshots_alive == 2
        del sent
        for _ in range(2):
            restore(model)
            assert model.snapshots_alive == 1
    finally:
        gc.enable()


def test_small_models_are_not_counted_at_all():
    model = make_model(np.zeros(3), monitor=Monitor())
    for _ in range(9):
        fold(model, [1.0], [np.ones(3)])
        model.keep_current()
        assert model.snapshots_alive == 0
