import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.measurements.fleet import FleetMeasurements, agreement_of
from edgeasync.policies.optimizers import (
    SGD,
    Adam,
    ClipByGlobalNorm,
    Nesterov,
    WeightDecay,
    check_chain,
)
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.policies.transforms import Conditions

F = np.float32
SEEDS = st.integers(0, 2**32 - 1)
KINDS = [
    SGD(),
    SGD(momentum=0.9),
    Nesterov(),
    Adam(),
    ClipByGlobalNorm(),
    WeightDecay(rate=0.1),
]
every_kind = pytest.mark.parametrize("stage", KINDS, ids=str)


def run(stage, gradients, *, parameters=None, staleness=()):
    """Run gradients through a stage, each with its staleness; return the steps and the state."""
    gradients = np.array(gradients, F)
    parameters = np.zeros_like(gradients[0]) if parameters is None else np.array(parameters, F)
    state = [np.zeros_like(gradients[0]) for _ in range(stage.state_vectors)]
    steps = []
    for count, gradient in enumerate(gradients):
        stale = staleness[count] if staleness else 0.0
        plan = stage.plan(Conditions(float(np.linalg.norm(gradient.astype(float))), count, stale))
        before = gradient.copy()
        stage.apply(gradient, parameters, state, plan)
        factor = stage.factor(plan)
        if factor is not None:
            np.testing.assert_array_equal(gradient, before * F(factor))
        steps.append(gradient)
    return np.array(steps), state


def noise(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


# -- momentum ------------------------------------------------------------------------------------------------

ONE_EACH = [[1.0], [1.0], [0.0], [4.0]]


@pytest.mark.parametrize(
    ("stage", "staleness", "steps", "velocity"),
    [
        (SGD(learning_rate=0.5), (), [0.5, 0.5, 0.0, 2.0], None),
        # v = v / 2 + g: 1, 1.5, 0.75, 4.375; the step is a quarter of it.
        (SGD(learning_rate=0.25, momentum=0.5), (), [0.25, 0.375, 0.1875, 1.09375], 4.375),
        # The same v; the step is a quarter of g + v / 2. The state is v / 2.
        (Nesterov(learning_rate=0.25, momentum=0.5), (), [0.375, 0.4375, 0.09375, 1.546875], 2.1875),
        (Nesterov(learning_rate=0.25, momentum=0.0), (), [0.25, 0.25, 0.0, 1.0], None),
        # Too stale in the second and third: v is g, the step at most g. Then v = 0 / 2 + 4.
        (SGD(learning_rate=2.0, momentum=0.5, staleness_max=0.5), (0.5, 0.6, 0.6, 0.5), [2.0, 1.0, 0.0, 8.0], 4.0),
        (SGD(learning_rate=2.0, staleness_max=0.5), (0.5, 0.6, 0.6, 0.5), [2.0, 1.0, 0.0, 8.0], None),
        (
            Nesterov(learning_rate=2.0, momentum=0.5, staleness_max=0.5),
            (0.5, 0.6, 0.6, 0.5),
            [3.0, 1.0, 0.0, 12.0],
            2.0,
        ),
        # A learning rate under 1 stays.
        (Nesterov(learning_rate=0.5, momentum=0.5, staleness_max=0.0), (1.0,) * 4, [0.5, 0.5, 0.0, 2.0], 0.0),
        # Half the momentum is left at staleness 1/2: 0.5 - 0.5 * 0.5.
        (SGD(momentum=0.5, correct_for_staleness=True), (0.5,) * 4, [1.0, 1.25, 0.3125, 4.078125], 4.078125),
        (SGD(momentum=0.5, correct_for_staleness=True), (1.0,) * 4, [1.0, 1.0, 0.0, 4.0], 4.0),
        (Nesterov(momentum=0.5, correct_for_staleness=True), (7.0,) * 4, [1.0, 1.0, 0.0, 4.0], 0.0),
    ],
    ids=str,
)
def test_momentum_by_hand(stage, staleness, steps, velocity):
    found, state = run(stage, ONE_EACH, staleness=staleness)
    assert found[:, 0].tolist() == steps
    assert [float(vector[0]) for vector in state] == ([] if velocity is None else [velocity])


@pytest.mark.parametrize(
    ("settings", "staleness", "momentum"),
    [
        ({}, 5.0, 0.8),
        ({"correct_for_staleness": True}, 0.0, 0.8),
        ({"correct_for_staleness": True}, 0.5, 0.7),
        ({"correct_for_staleness": True}, 4.0, 0.0),
        ({"correct_for_staleness": True}, 1e9, 0.0),
        ({"staleness_max": 0.5}, 0.5, 0.8),
        ({"staleness_max": 0.5}, 0.51, 0.0),
        ({"staleness_max": 0.0}, 0.0, 0.8),
    ],
    ids=str,
)
def test_how_much_momentum_an_update_has(settings, staleness, momentum):
    for kind in (SGD, Nesterov):
        planned = kind(momentum=0.8, **settings).plan(Conditions(1.0, 7, staleness))
        assert planned == (1.0, pytest.approx(momentum, abs=1e-15))


@pytest.mark.parametrize(
    ("extrapolation", "staleness", "rate"),
    [(0.0, 0.0, 1.25), (1.0, 0.0, 1.25), (1.5, 0.0, 1.5), (1e6, 0.0, 1.75), (1.5, 0.6, 1.0)],
)
def test_how_far_an_update_goes_when_devices_disagree(extrapolation, staleness, rate):
    conditions = Conditions(1.0, 9, staleness, extrapolation=extrapolation)
    for kind in (SGD, Nesterov):
        stage = kind(learning_rate=1.25, learning_rate_max=1.75, staleness_max=0.5)
        assert stage.plan(conditions)[0] == rate
        assert kind(learning_rate=1.25).plan(conditions)[0] == 1.25


@pytest.mark.parametrize(("devices", "planned"), [(1, (1.0, 0.0)), (2, (1.25, 0.8)), (9, (1.25, 0.8))])
def test_a_step_is_taken_as_it_is_below_a_number_of_devices(devices, planned):
    conditions = Conditions(1.0, 9, devices=devices)
    for kind in (SGD, Nesterov):
        assert kind(learning_rate=1.25, momentum=0.8, devices_min=2).plan(conditions) == planned
        assert kind(learning_rate=1.25, momentum=0.8).plan(conditions) == (1.25, 0.8)


def test_the_highest_learning_rate_is_not_under_the_learning_rate():
    with pytest.raises(ValueError, match=r"learning_rate_max \(0\.5\) must not be below learning_rate \(1\)"):
        SGD(learning_rate_max=0.5)


def distances_of_a_fleet_that_learns_by_heart(stage, versions=100):
    """Return the model's distances from the middle of ten devices that each reach their own optimum every time."""
    optima = noise(0, (10, 50))
    optima -= optima.mean(axis=0)
    model, velocity, fleet, distances = np.full(50, 14.0, F), np.zeros(50, F), FleetMeasurements(), []
    for count in range(versions):
        updates = optima - model
        step = -updates.mean(axis=0)
        norm, norms = float(np.linalg.norm(step)), np.linalg.norm(updates, axis=1).tolist()
        plan = stage.plan(Conditions(norm, count, extrapolation=fleet.extrapolation(10)))
        stage.apply(step, model, [velocity], plan)
        model -= step
        fleet.observe_agreement(agreement_of(norm, norms, [0.1] * 10))
        distances.append(float(np.linalg.norm(model)))
    return distances


def test_a_rate_that_follows_the_agreement_does_not_diverge_where_a_fixed_one_does():
    """An overshot model is pulled back by all devices alike: they agree, and the rate falls."""
    optima_apart = 7.0
    follows = Nesterov(learning_rate=1.25, momentum=0.85, learning_rate_max=1.75)
    assert max(distances_of_a_fleet_that_learns_by_heart(follows)[30:]) < 3 * optima_apart
    fixed = Nesterov(learning_rate=1.75, momentum=0.85)
    assert distances_of_a_fleet_that_learns_by_heart(fixed, 29)[-1] > 1e6


# -- Adam ----------------------------------------------------------------------------------------------------


def test_adam_by_hand():
    """The first step is the learning rate, whatever the gradient; then averages of 2, 0 and 4, 0, corrected.

    m: 1, 1/2 over 1/2, 3/4; v: 1, 3/4 over 1/4, 7/16, so that the second step is 2/3 / sqrt(12/7).
    """
    adam = Adam(learning_rate=0.5, beta1=0.5, beta2=0.75, epsilon=1e-12)
    steps, (mean, square) = run(adam, [[2.0, -1e-3, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(steps[0], [0.5, -0.5, 0.0], rtol=1e-6)
    second = 0.5 * (2 / 3) / np.sqrt(12 / 7)
    np.testing.assert_allclose(steps[1], [second, -second, 0.0], rtol=1e-6)
    np.testing.assert_allclose([mean[0], square[0]], [0.5, 0.75], rtol=1e-6)


def test_adam_follows_float64_and_adds_epsilon_outside_the_root():
    gradients = noise(0, (200, 7)) * np.logspace(-6, 2, 7, dtype=F)
    steps, _ = run(Adam(learning_rate=0.01, beta1=0.8, beta2=0.95, epsilon=1e-4), gradients)
    mean = square = np.zeros(7)
    for count, (gradient, step) in enumerate(zip(gradients.astype(np.float64), steps, strict=True), 1):
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        root = np.sqrt(square / (1 - 0.95**count)) + 1e-4
        np.testing.assert_allclose(step, 0.01 * mean / (1 - 0.8**count) / root, rtol=2e-5, atol=1e-9)


def test_an_epsilon_beyond_float32_still_keeps_the_divisor_from_zero():
    steps, _ = run(Adam(epsilon=1e-300), [[0.0, 1e-30, -1e-45], [0.0, 0.0, 1.0]])
    assert np.isfinite(steps).all()
    assert not steps[:, 0].any()


def test_shares_that_float32_cannot_tell_from_one_still_move():
    steps, (mean, _) = run(Adam(learning_rate=1.0, beta1=1 - 1e-9), [[1.0], [1.0]])
    np.testing.assert_allclose(mean, [2e-9], rtol=1e-5)
    np.testing.assert_allclose(steps, [[1.0], [1.0]], rtol=1e-5)


# -- clipping and decay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "observed", "factor"),
    [(10.0, 20.0, 0.5), (10.0, 10.0, 1.0), (10.0, 9.9, 1.0), (10.0, 0.0, 1.0), (2.0, 1e300, 2e-300)],
)
def test_clip_by_hand(norm, observed, factor):
    stage = ClipByGlobalNorm(norm=norm)
    assert stage.plan(Conditions(observed, 0)) == (factor,)
    assert stage.factor((factor,)) == factor


def test_a_norm_that_is_no_number_does_not_turn_into_one():
    stage = ClipByGlobalNorm(norm=2.0)
    assert stage.plan(Conditions(math.nan, 0)) == (1.0,)
    assert stage.plan(Conditions(math.inf, 0)) == (0.0,)


@given(SEEDS, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clip_never_exceeds_the_norm_and_keeps_the_direction(seed, norm, length):
    gradient = noise(seed, (1, 50))
    gradient *= F(length / np.linalg.norm(gradient))
    observed = float(np.linalg.norm(gradient.astype(float)))
    (step,), state = run(ClipByGlobalNorm(norm=norm), gradient)
    assert not state
    found = float(np.linalg.norm(step.astype(float)))
    assert found <= norm * (1 + 1e-6)
    assert found == pytest.approx(min(norm, observed), rel=1e-6)
    np.testing.assert_allclose(step * (observed / found), gradient[0], rtol=1e-5)
    if observed <= norm:
        assert step.tobytes() == gradient.tobytes()


def test_weight_decay_by_hand():
    stage = WeightDecay(rate=0.25)
    steps, state = run(stage, [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], parameters=[4.0, -8.0, 0.0])
    assert steps.tolist() == [[2.0, -1.0, 0.0], [1.0, -2.0, 0.0]]
    assert not state
    assert stage.factor(stage.plan(Conditions(1.0, 0))) is None


# -- all of them ---------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1.0, 1e10, 1e18])
def test_gradients_of_any_size_give_finite_steps_without_a_warning(stage, size):
    steps, state = run(stage, np.array([[1.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]) * size)
    assert np.isfinite(steps).all()
    assert all(np.isfinite(vector).all() for vector in state)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"kind": "sgd", "momentum": 1}, SGD, "momentum: expected `float` < 1.0"),
        ({"kind": "nesterov", "warm_up": 4}, Nesterov, "unknown key `warm_up`"),
        ({"kind": "adam", "epsilon": 0}, Adam, "epsilon: expected `float` > 0.0"),
        ({"kind": "weight_decay"}, WeightDecay, "missing key `rate`"),
    ],
)
def test_what_makes_no_sense_is_refused(table, kind, message):
    with pytest.raises(ConfigError) as caught:
        convert(table, kind, where="here")
    assert str(caught.value).startswith(f"here: {message}")


@dataclass(frozen=True)
class Custom:
    """Somebody's own stage: it keeps state, of which nothing is known."""

    state_vectors: int = 1

    def plan(self, conditions):
        return ()

    def factor(self, scalars):
        return None


CLIP, SLOW = ClipByGlobalNorm(), CosineSchedule(updates=9)


@pytest.mark.parametrize(
    "chain",
    [
        [],
        [CLIP, SLOW, CLIP, SGD(learning_rate=0.5), CLIP, Nesterov(), SLOW],
        [CLIP, WeightDecay(rate=0.1), Adam(), WeightDecay(rate=0.1), SLOW],
        [SGD(), SGD(learning_rate=0.1), Adam(), Nesterov(momentum=0.0)],
        [Custom(), Nesterov()],
    ],
    ids=str,
)
def test_chains_that_make_sense(chain):
    check_chain(chain)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (
            [Adam(), CLIP],
            "`clip_by_global_norm` at 1 must come before `adam` at 0, which makes the norm of the update unknown",
        ),
        ([WeightDecay(rate=0.1), CLIP], "`clip_by_global_norm` at 1 must come before `weight_decay` at 0"),
        ([Custom(), CLIP], "`clip_by_global_norm` at 1 must come before `Custom` at 0"),
        ([SGD(momentum=0.5), SGD(), Nesterov()], "`nesterov` at 2 and `sgd` at 0 both have momentum"),
        ([Nesterov(), Adam()], "`adam` at 1 and `nesterov` at 0 both have momentum"),
    ],
    ids=str,
)
def test_chains_that_contradict_themselves(chain, message):
    with pytest.raises(ValueError) as caught:
        check_chain(chain)
    assert str(caught.value).startswith(message)
