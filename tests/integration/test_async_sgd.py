"""`async_sgd`: one call, with processes as workers, on an IDX copy of the digits."""

import numpy as np
import pytest

from edgeasync.async_train import async_sgd, data, nn, optim
from examples.async_train.digits_idx import write_idx_digits
from tests.support.models.one_loop import accuracy, one_loop


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), seed=1)


@pytest.mark.process
def test_processes_reach_what_one_loop_reaches(tmp_path):
    folder = write_idx_digits(tmp_path / "digits", zipped=True)
    digits, held_out = data.MNIST(folder, train=True), data.MNIST(folder, train=False)
    goal = one_loop(
        network, digits, held_out, lambda parameters: optim.SGD(parameters, lr=0.1), epochs=20, batch_size=16
    )
    together = async_sgd(
        network(),
        data.DataLoader(digits, batch_size=16, shuffle=True),
        num_workers=2,
        num_epochs=20,
        lr=0.1,
        loss_fn=nn.CrossEntropyLoss(),
    )
    assert accuracy(together, held_out) >= goal - 0.01


def test_a_file_comes_back_as_a_model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(nn.Sequential(nn.Linear(4, 2)).SerializeToString())
    x = np.random.default_rng(0).normal(size=(200, 4))
    trained = async_sgd(str(path), (x, (x[:, 0] > 0).astype(int)), num_epochs=50, lr=0.5, engine="tasks")
    assert (trained(x).argmax(axis=1) == (x[:, 0] > 0)).mean() > 0.95
