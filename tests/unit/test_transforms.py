from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.transforms import (
    SGD,
    Adam,
    Conditions,
    apply_chain,
    leading_factor,
    plan_chain,
    state_vectors,
)

F = np.float32


def run(chain, gradients):
    """Run whole vectors through a chain; return the updates."""
    state = [np.zeros(len(gradients[0]), F) for _ in range(state_vectors(chain))]
    updates = []
    for count, gradient in enumerate(gradients):
        update = np.array(gradient, F)
        apply_chain(
            chain,
            update,
            np.zeros_like(update),
            state,
            plan_chain(chain, Conditions(float(np.linalg.norm(update)), count)),
        )
        updates.append(update)
    return updates, state


def test_sgd_by_hand():
    updates, _ = run([SGD(learning_rate=0.5)], [[1.0, -2.0, 0.0], [4.0, 0.25, -1.0]])
    np.testing.assert_array_equal(updates, np.array([[0.5, -1.0, 0.0], [2.0, 0.125, -0.5]], F))


def test_momentum_by_hand():
    """v = v / 2 + g: 1, 1.5, 0.75, 4.375; the step is a quarter of it."""
    updates, (velocity,) = run([SGD(learning_rate=0.25, momentum=0.5)], [[1.0], [1.0], [0.0], [4.0]])
    assert [float(update[0]) for update in updates] == [0.25, 0.375, 0.1875, 1.09375]
    assert float(velocity[0]) == 4.375


def test_adam_by_hand():
    """The first step is the learning rate, whatever the gradient; then averages of 2, 0 and 4, 0, corrected.

    m: 1, 1/2 over 1/2, 3/4; v: 1, 3/4 over 1/4, 7/16, so that the second step is 2/3 / sqrt(12/7).
    """
    adam = Adam(learning_rate=0.5, beta1=0.5, beta2=0.75, epsilon=1e-12)
    updates, (mean, square) = run([adam], [[2.0, -1e-3, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(updates[0], [0.5, -0.5, 0.0], rtol=1e-6)
    second = 0.5 * (2 / 3) / np.sqrt(12 / 7)
    np.testing.assert_allclose(updates[1], [second, -second, 0.0], rtol=1e-6)
    np.testing.assert_allclose([mean[0], square[0]], [0.5, 0.75], rtol=1e-6)


def test_adam_follows_float64_and_adds_epsilon_outside_the_root():
    gradients = np.random.default_rng(0).standard_normal((200, 7)).astype(F) * np.logspace(-6, 2, 7, dtype=F)
    adam = Adam(learning_rate=0.01, beta1=0.8, beta2=0.95, epsilon=1e-4)
    updates, _ = run([adam], gradients)
    mean = square = np.zeros(7)
    for count, (gradient, update) in enumerate(zip(gradients.astype(np.float64), updates, strict=True), 1):
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        root = np.sqrt(square / (1 - 0.95**count)) + 1e-4
        np.testing.assert_allclose(update, 0.01 * mean / (1 - 0.8**count) / root, rtol=2e-5, atol=1e-9)


def test_adam_is_never_mere_scaling_and_keeps_two_vectors():
    chain = [SGD(learning_rate=0.5), Adam(), SGD(momentum=0.5)]
    assert state_vectors(chain) == 3
    assert leading_factor(chain, plan_chain(chain, Conditions(1.0, 0))) == (0.5, 1)


def test_momentum_of_a_chain_takes_its_own_state_vector():
    chain = [SGD(momentum=0.5), SGD(learning_rate=0.5), SGD(learning_rate=2.0, momentum=0.25)]
    assert state_vectors(chain) == 2
    _, (first, last) = run(chain, [[1.0], [1.0]])
    assert float(first[0]) == 1.5  # 0.5 * 1 + 1
    assert float(last[0]) == 0.875  # 0.25 * 0.5 + 0.75


CHAINS = st.lists(
    st.builds(
        SGD,
        learning_rate=st.sampled_from([0.1, 1.0, 3.0]),
        momentum=st.sampled_from([0.0, 0.3, 0.9]),
    )
    | st.builds(Adam, beta1=st.sampled_from([0.0, 0.9]), epsilon=st.sampled_from([1e-8, 0.1])),
    min_size=1,
    max_size=3,
)


@given(CHAINS, st.integers(0, 2**32 - 1), st.lists(st.integers(0, 97), max_size=4))
def test_slices_give_the_whole_to_the_bit(chain, seed, cuts):
    generator = np.random.default_rng(seed)
    gradients = generator.standard_normal((3, 97)).astype(F)
    whole, whole_state = run(chain, gradients)
    sliced_state = [np.zeros(97, F) for _ in range(state_vectors(chain))]
    bounds = [0, *sorted(cuts), 97]
    for count, gradient in enumerate(gradients.copy()):
        plan = plan_chain(chain, Conditions(float(np.linalg.norm(gradient)), count))
        for start, stop in pairwise(bounds):
            apply_chain(
                chain,
                gradient[start:stop],
                np.zeros(stop - start, F),
                [state[start:stop] for state in sliced_state],
                plan,
            )
        assert gradient.tobytes() == whole[count].tobytes()
    assert [state.tobytes() for state in sliced_state] == [state.tobytes() for state in whole_state]


@pytest.mark.parametrize(
    ("chain", "product", "used"),
    [
        ([], 1.0, 0),
        ([SGD(learning_rate=0.5)], 0.5, 1),
        ([SGD(learning_rate=0.5), SGD(learning_rate=4.0)], 2.0, 2),
        ([SGD(momentum=0.5)], 1.0, 0),
        ([SGD(learning_rate=0.5), SGD(momentum=0.5), SGD(learning_rate=3.0)], 0.5, 1),
    ],
)
def test_leading_factor_gathers_only_the_front(chain, product, used):
    assert leading_factor(chain, plan_chain(chain, Conditions(1.0, 0))) == (product, used)


@given(CHAINS, st.integers(0, 2**32 - 1))
def test_leading_factor_then_the_rest_is_the_whole_chain(chain, seed):
    gradient = np.random.default_rng(seed).standard_normal(31).astype(F)
    ((whole,), _) = run(chain, [gradient])
    plan = plan_chain(chain, Conditions(1.0, 0))
    factor, used = leading_factor(chain, plan)
    rest = gradient * F(factor)
    state = [np.zeros(31, F) for _ in range(state_vectors(chain[used:]))]
    apply_chain(chain[used:], rest, np.zeros(31, F), state, plan[used:])
    np.testing.assert_allclose(rest, whole, rtol=1e-6)


def test_a_plan_of_another_chain_is_refused():
    with pytest.raises(ValueError, match="zip"):
        apply_chain([SGD(), SGD()], np.zeros(1, F), np.zeros(1, F), [], plan_chain([SGD()], Conditions(0.0, 0)))
