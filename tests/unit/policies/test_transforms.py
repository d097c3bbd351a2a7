"""Chains: what holds for any stages in any order. The kinds themselves are in test_optimizers, test_schedules."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.optimizers import (
    SGD,
    Adam,
    ClipByGlobalNorm,
    Nesterov,
    TransformKind,
    WeightDecay,
)
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.policies.transforms import (
    Conditions,
    apply_chain,
    leading_factor,
    plan_chain,
    scale,
    state_vectors,
)

F = np.float32


def run(chain, gradients, parameters=None, staleness=0.0):
    """Run whole vectors through a chain; return the steps and the state."""
    parameters = np.zeros(len(gradients[0]), F) if parameters is None else parameters
    state = [np.zeros(len(gradients[0]), F) for _ in range(state_vectors(chain))]
    steps = []
    for count, gradient in enumerate(gradients):
        step = np.array(gradient, F)
        plan = plan_chain(chain, Conditions(float(np.linalg.norm(step)), count, staleness))
        apply_chain(chain, step, parameters, state, plan)
        steps.append(step)
    return steps, state


SHARES = st.sampled_from([0.0, 0.3, 0.9])
MOMENTUM = {
    "learning_rate": st.sampled_from([0.1, 1.0, 3.0]),
    "momentum": SHARES,
    "correct_for_staleness": st.booleans(),
    "staleness_max": st.sampled_from([None, 0.5]),
    "devices_min": st.sampled_from([1, 2]),
    "learning_rate_max": st.sampled_from([None, 3.0]),
}
STAGES = {
    SGD: st.builds(SGD, **MOMENTUM),
    Nesterov: st.builds(Nesterov, **MOMENTUM),
    Adam: st.builds(Adam, beta1=SHARES, epsilon=st.sampled_from([1e-8, 0.1])),
    ClipByGlobalNorm: st.builds(ClipByGlobalNorm, norm=st.sampled_from([0.1, 10.0])),
    WeightDecay: st.builds(WeightDecay, rate=st.sampled_from([0.01, 1.0])),
    CosineSchedule: st.builds(CosineSchedule, updates=st.sampled_from([3, 9])),
}
CHAINS = st.lists(st.one_of(*STAGES.values()), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**32 - 1)
STALENESS = st.sampled_from([0.0, 0.25, 1.0])


def test_no_kind_is_left_out_here():
    assert set(STAGES) == set(TransformKind.__args__)


@given(CHAINS, SEEDS, st.lists(st.integers(0, 97), max_size=4), STALENESS)
def test_slices_give_the_whole_to_the_bit(chain, seed, cuts, staleness):
    generator = np.random.default_rng(seed)
    gradients = generator.standard_normal((4, 97)).astype(F)
    parameters = generator.standard_normal(97).astype(F)
    whole, whole_state = run(chain, gradients, parameters, staleness)
    sliced_state = [np.zeros(97, F) for _ in range(state_vectors(chain))]
    bounds = [0, *sorted(cuts), 97]
    for count, gradient in enumerate(gradients.copy()):
        plan = plan_chain(chain, Conditions(float(np.linalg.norm(gradient)), count, staleness))
        for start, stop in pairwise(bounds):
            apply_chain(
                chain,
                gradient[start:stop],
                parameters[start:stop],
                [state[start:stop] for state in sliced_state],
                plan,
            )
        assert gradient.tobytes() == whole[count].tobytes()
    assert [state.tobytes() for state in sliced_state] == [state.tobytes() for state in whole_state]


@given(CHAINS, SEEDS, STALENESS)
def test_nothing_but_gradient_and_state_is_written_to(chain, seed, staleness):
    parameters = np.random.default_rng(seed).standard_normal(31).astype(F)
    parameters.flags.writeable = False
    steps, _ = run(chain, np.random.default_rng(seed).standard_normal((2, 31)), parameters, staleness)
    assert all(step.dtype == np.float32 and np.isfinite(step).all() for step in steps)


@given(CHAINS, SEEDS, STALENESS, st.integers(0, 5))
def test_leading_factor_then_the_rest_is_the_whole_chain(chain, seed, staleness, count):
    generator = np.random.default_rng(seed)
    gradient, parameters = generator.standard_normal((2, 31)).astype(F)
    before = [np.abs(generator.standard_normal(31)).astype(F) for _ in range(state_vectors(chain))]
    plan = plan_chain(chain, Conditions(float(np.linalg.norm(gradient)), count, staleness))
    whole, state = gradient.copy(), [vector.copy() for vector in before]
    apply_chain(chain, whole, parameters, state, plan)
    factor, used = leading_factor(chain, plan)
    assert not any(stage.state_vectors for stage in chain[:used])
    rest, rest_state = gradient * F(factor), [vector.copy() for vector in before]
    apply_chain(chain[used:], rest, parameters, rest_state, plan[used:])
    for one, other in zip([whole, *state], [rest, *rest_state], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(one).max()))


@pytest.mark.parametrize(
    ("chain", "product", "used"),
    [
        ([], 1.0, 0),
        ([SGD(learning_rate=0.5), SGD(learning_rate=4.0)], 2.0, 2),
        ([SGD(momentum=0.5)], 1.0, 0),
        ([SGD(learning_rate=0.5), SGD(momentum=0.5), SGD(learning_rate=3.0)], 0.5, 1),
        ([ClipByGlobalNorm(norm=0.5), SGD(learning_rate=0.25), Nesterov()], 0.125, 2),
        ([WeightDecay(rate=0.1), SGD(learning_rate=0.5)], 1.0, 0),
    ],
    ids=str,
)
def test_leading_factor_gathers_only_the_stateless_front(chain, product, used):
    assert leading_factor(chain, plan_chain(chain, Conditions(1.0, 0))) == (product, used)


def test_momentum_of_a_chain_takes_its_own_state_vector():
    chain = [SGD(momentum=0.5), SGD(learning_rate=0.5), SGD(learning_rate=2.0, momentum=0.25)]
    assert state_vectors(chain) == 2
    _, (first, last) = run(chain, [[1.0], [1.0]])
    assert float(first[0]) == 1.5  # 0.5 * 1 + 1
    assert float(last[0]) == 0.875  # 0.25 * 0.5 + 0.75


def test_a_stage_is_told_the_norm_of_what_reaches_it():
    clip = ClipByGlobalNorm(norm=1.0)
    chain = [SGD(learning_rate=0.5), clip, SGD(learning_rate=3.0), clip]
    assert plan_chain(chain, Conditions(8.0, 0)) == ((0.5, 0.0), (0.25,), (3.0, 0.0), (1 / 3,))
    ended = CosineSchedule(updates=1)
    assert plan_chain([ended, clip], Conditions(8.0, 1)) == ((0.0,), (1.0,))


def test_scaling_by_one_touches_nothing():
    values = np.ones(3, F)
    values.flags.writeable = False
    scale(values, 1.0)
    with pytest.raises(ValueError, match="read-only"):
        scale(values, 0.5)
