"""A model in the user's own loop: accumulated gradients, parameters from a run, and copies."""

import copy
import pickle

import numpy as np
import pytest

from edgeasync import Stop, train
from edgeasync.async_train import nn, optim
from edgeasync.errors import ConfigError, ModelMismatchError
from tests.support.models.toolbox import batch, model


def test_two_backwards_add_up_until_zero_grad():
    network, (x, y) = model(), batch()
    nn.CrossEntropyLoss()(network(x), y).backward()
    once = network.gradient_sum
    nn.CrossEntropyLoss()(network(x), y).backward()
    assert np.allclose(network.gradient_sum, 2 * once)
    network.zero_grad()
    assert network.gradient_sum is None


def test_backward_needs_scores_that_come_straight_from_a_model():
    network, (x, y) = model(), batch()
    for scores in (network(x) * 2.0, network.eval()(x)):
        with pytest.raises(ConfigError, match=r"model\.train\(\)"):
            nn.CrossEntropyLoss()(scores, y).backward()


def test_a_model_is_trained_by_edgeasync_and_takes_the_values_back():
    network, (x, y) = model(), batch(256)
    run = train(network, (x, y), workers=2, until=Stop(epochs=10), optimizer=optim.SGD(lr=0.5).optimizer())
    network.load_state_dict(run.arrays)
    assert (network.eval()(x).argmax(axis=1) == y).mean() > 0.9
    with pytest.raises(ModelMismatchError, match=r"0\.bias"):
        nn.Sequential(nn.Linear(4, 2)).load_state_dict(run.arrays)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_values_of_its_own(copied):
    network, (x, _) = model(), batch()
    fresh, scores = copied(network), network(x)
    assert np.array_equal(fresh(x), scores)
    network.network.vector[:] = 0.5
    later = copied(copied(network))
    network.network.vector[:] = 0.0
    assert np.array_equal(fresh(x), scores)
    assert all((array == 0.5).all() for array in later.parameters())
