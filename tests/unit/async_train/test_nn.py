"""Models that are called, losses and optimizers, as programs of the reference write them."""

import copy
import math
import pickle

import numpy as np
import pytest

from edgeasync import SGD, Adam, Stop, losses, train
from edgeasync import nn as layers
from edgeasync.async_train import models, nn, optim
from edgeasync.async_train.arrays import as_array
from edgeasync.async_train.shapes import input_shape_of
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.policies.optimizers import WeightDecay


def batch(count=64, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return as_array(x), as_array((x[:, 0] > x[:, 1]).astype(np.int64))


def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), seed=1)


@pytest.mark.parametrize(("kind", "lr"), [(optim.SGD, 0.5), (optim.Adam, 0.05)])
def test_a_loop_of_backward_and_step_learns(kind, lr):
    network, (x, y) = model(), batch()
    optimizer, loss_fn = kind(network.parameters(), lr=lr), nn.CrossEntropyLoss()
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_fn(network(x.to("cpu")), y)
        loss.backward()
        optimizer.step()
    network.eval()
    assert loss.item() < 0.2
    assert (network(*batch(200, seed=1)[:1]).argmax(axis=1) == batch(200, seed=1)[1]).mean() > 0.9


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
    with pytest.raises(ConfigError, match=r"Conv2d got \[batch, 8, 8, 3\]"):
        network(np.zeros((2, 8, 8, 3)))


def test_pictures_go_into_a_dense_layer_flat():
    assert nn.Sequential(nn.Linear(64, 10))(np.zeros((3, 1, 8, 8))).shape == (3, 10)


@pytest.mark.parametrize(
    ("ours", "loss", "targets"),
    [
        (nn.CrossEntropyLoss(weight=[1, 2], label_smoothing=0.1), losses.CrossEntropy, np.array([0, 1, 1])),
        (nn.CrossEntropyLoss(ignore_index=1), losses.CrossEntropy, np.array([0, 1, 0])),
        (nn.MSELoss(), losses.MeanSquaredError, np.ones((3, 2), np.float32)),
        (nn.L1Loss(), losses.MeanAbsoluteError, np.ones((3, 2), np.float32)),
        (nn.HuberLoss(delta=0.5), losses.Huber, np.ones((3, 2), np.float32)),
        (nn.BCEWithLogitsLoss(), losses.BinaryCrossEntropy, np.ones((3, 2), np.float32)),
    ],
)
def test_a_loss_on_scores_is_the_loss_that_edgeasync_trains_with(ours, loss, targets):
    assert isinstance(ours.loss(), loss)
    network = nn.Sequential(nn.Linear(4, 2), seed=2)
    x = batch(3)[0]
    assert ours(network(x), targets) == pytest.approx(network.network.gradient(x, targets, ours.loss()).loss)


def test_optimizers_are_edgeasyncs():
    assert optim.SGD(lr=0.1, momentum=0.9).optimizer() == SGD(learning_rate=0.1, momentum=0.9)
    assert optim.Adam(lr=0.1, betas=(0.8, 0.9)).optimizer() == Adam(learning_rate=0.1, beta1=0.8, beta2=0.9)
    assert optim.SGD(lr=0.1, weight_decay=0.01).optimizer() == [WeightDecay(rate=0.01), SGD(learning_rate=0.1)]
    with pytest.raises(TypeError, match="lerning_rate"):
        optim.SGD(lerning_rate=0.1)
    with pytest.raises(ConfigError, match=r"model\.parameters\(\)"):
        optim.Adam(lr=0.1).step()


def test_names_that_nn_lacks_are_told():
    with pytest.raises(AttributeError, match=r"has no 'Linaer'.* torch\.nn\.Module"):
        nn.Linaer  # noqa: B018


def test_a_residual_network_of_50_layers():
    graph = layers.to_onnx(models.resnet50(classes=10, side=32).layers, (3, 32, 32)).graph
    statistics = [tensor for tensor in graph.initializer if "running" in tensor.name]
    trained = [tensor for tensor in graph.initializer if "running" not in tensor.name]
    # He et al. have 25.6 million with 1000 classes, of which a class has 2049 in the last layer.
    assert sum(math.prod(tensor.dims) for tensor in trained) == 25_557_032 - 990 * 2049
    assert len(statistics) == 2 * 53
    assert [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim] == [0, 10]


def test_a_pretrained_model_is_looked_for_where_the_error_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"resnet50\.onnx: no such file; nothing is downloaded"):
        models.resnet50(pretrained=True)
    path = tmp_path / ".cache/edgeasync/models/resnet50.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(nn.Sequential(nn.Linear(4, 2)).SerializeToString())
    assert models.resnet50(pretrained=True)(np.zeros((1, 4))).shape == (1, 2)
