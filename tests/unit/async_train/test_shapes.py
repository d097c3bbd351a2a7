"""The input shape comes from the layers, or from the first batch."""

import numpy as np
import pytest

from edgeasync.async_train import nn
from edgeasync.async_train.shapes import input_shape_of
from edgeasync.errors import ConfigError


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ((nn.Linear(64, 10),), (64,)),
        ((nn.Flatten(), nn.ReLU(), nn.Linear(784, 10)), (784,)),
        ((nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(338, 10)), (1, 28, 28)),
        ((nn.Residual(nn.Conv2d(3, 3, 3, padding=1)), nn.Flatten(), nn.Linear(3072, 2)), (3, 32, 32)),
    ],
)
def test_layers_say_the_shape_of_an_example(parts, shape):
    assert input_shape_of(nn.Sequential(*parts).layers) == shape


def test_layers_that_take_any_picture_wait_for_the_first_one():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GlobalAvgPool(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="input_shape"):
        network.state_dict()
    small = network(np.zeros((2, 1, 8, 8)))
    values = network.state_dict()
    assert network(np.zeros((2, 1, 12, 12))).shape == small.shape
    assert all(np.array_equal(array, values[name]) for name, array in network.state_dict().items())


def test_pictures_with_their_channels_last_are_refused():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    assert network(np.zeros((2, 192))).shape == network(np.zeros((2, 3, 8, 8))).shape == (2, 2)
    with pytest.raises(ConfigError, match=r"0 Conv2d got \[batch, 8, 8, 3\], but needs \[batch, 3, height"):
        network(np.zeros((2, 8, 8, 3)))


def test_pictures_go_into_a_dense_layer_flat():
    assert nn.Sequential(nn.Linear(64, 10))(np.zeros((3, 1, 8, 8))).shape == (3, 10)
