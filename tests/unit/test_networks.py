"""A network with its values: scores, gradients, and where it goes."""

import numpy as np
import onnx
import pytest

from edgeasync import Stop, losses, networks, nn, train
from edgeasync.errors import ConfigError, DataError
from edgeasync.networks import Network

LAYERS = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(count=12, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1)


@pytest.mark.parametrize("loss", ["cross_entropy", losses.CrossEntropy(class_weights=[1, 2, 3]), "mse", "huber"])
def test_the_gradient_is_that_of_the_loss_of_the_scores(loss):
    network = Network(LAYERS, (4,), seed=3)
    x, y = batch()
    y = y if losses.kind_of(loss) == "cross_entropy" else np.eye(3, dtype=np.float32)[y]
    found = network.gradient(x, y, loss)
    assert found.loss == pytest.approx(networks.mean_loss(loss, network(x), y), rel=1e-5)
    direction = np.random.default_rng(1).normal(size=network.spec.length).astype(np.float32)
    step = np.float32(1e-2)
    start, slope = network.vector.copy(), float(found.vector @ direction)
    values = []
    for sign in (1, -1):
        network.vector[:] = start + sign * step * direction
        values.append(networks.mean_loss(loss, network(x), y))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


def test_a_write_to_a_named_array_changes_the_scores():
    network = Network(nn.Linear(4, 3), (4,))
    network.arrays["0.weight"][...] = 0.0
    network.arrays["0.bias"][...] = [1.0, 2.0, 3.0]
    assert network(np.ones((2, 4))).tolist() == [[1.0, 2.0, 3.0]] * 2


def test_running_statistics_move_with_gradients_and_have_none():
    network = Network(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,))
    found = network.gradient(*batch())
    assert network.arrays["1.running_mean"].any()
    assert not found.vector[network.spec.trained_length :].any()


def test_a_network_goes_where_an_onnx_model_goes_with_its_present_values(tmp_path):
    network = Network(LAYERS, (4,))
    network.vector[:] = 0.25
    path = tmp_path / "model.onnx"
    path.write_bytes(network.SerializeToString())
    x, y = batch()
    for other in (Network(path), Network(onnx.load(path)), Network(network)):
        assert np.array_equal(other(x), network(x))
    run = train(network, (x, y), workers=1, until=Stop(updates=1))
    assert run.arrays.keys() == network.arrays.keys()
    assert np.array_equal(network.vector, np.full_like(network.vector, 0.25))


def test_axes_in_another_order_are_refused():
    network = Network(nn.Conv1d(2, 3, 1), (2, 5))
    with pytest.raises(DataError, match=r"shape \(5, 2\), but the network expects \(2, 5\)"):
        network(np.zeros((4, 5, 2)))
    with pytest.raises(
        DataError, match=r"the targets have shape \(4, 5, 3\), but the scores have shape \(4, 3, 5\)"
    ):
        networks.mean_loss("mse", np.zeros((4, 3, 5)), np.zeros((4, 5, 3)))


def test_mistakes_are_named():
    network = Network(nn.Linear(4, 3), (4,))
    with pytest.raises(DataError, match="expects \\(4,\\)"):
        network.gradient(np.ones((2, 5)), [0, 1])
    with pytest.raises(DataError, match="the network expects \\(4,\\)"):
        network(np.ones((2, 5)))
    with pytest.raises(DataError, match="label 3 is out of range: the hub's model has 3 classes"):
        network.gradient(np.ones((1, 4)), [3])
    with pytest.raises(DataError, match="inputs image, but the network has x"):
        network({"image": np.ones((1, 4))})
    with pytest.raises(ConfigError, match="input_shape"):
        Network(LAYERS)
    with pytest.raises(ConfigError, match="model is int"):
        Network(3)
    with pytest.raises(DataError, match=r"the targets have shape \(1, 2\), but the scores have shape \(1, 1\)"):
        networks.mean_loss("mse", [[1.0]], [[1.0, 2.0]])
