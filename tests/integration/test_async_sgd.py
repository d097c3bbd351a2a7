"""`async_sgd`: one call, with processes as workers, on an IDX copy of the digits."""

import numpy as np
import pytest

from edgeasync.async_train import async_sgd, data, nn, optim
from examples.async_train.digits_idx import write_idx_digits


def accuracy(model, digits):
    x, y = next(iter(data.DataLoader(digits, batch_size=len(digits))))
    return (model.eval()(x).argmax(axis=1) == y).mean()


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), seed=1)


@pytest.mark.process
def test_processes_reach_what_one_loop_reaches(tmp_path):
    folder = write_idx_digits(tmp_path / "digits", zipped=True)
    digits, held_out = data.MNIST(folder, train=True), data.MNIST(folder, train=False)
    alone, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(20):
        for inputs, targets in data.DataLoader(digits, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss_fn(alone(inputs), targets).backward()
            optimizer.step()
    together = async_sgd(
        network(),
        data.DataLoader(digits, batch_size=16, shuffle=True),
        num_workers=2,
        num_epochs=20,
        lr=0.1,
        loss_fn=loss_fn,
    )
    assert accuracy(together, held_out) >= accuracy(alone, held_out) - 0.01


def test_a_file_comes_back_as_a_model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(nn.Sequential(nn.Linear(4, 2)).SerializeToString())
    x = np.random.default_rng(0).normal(size=(200, 4))
    trained = async_sgd(str(path), (x, (x[:, 0] > 0).astype(int)), num_epochs=50, lr=0.5, engine="tasks")
    assert (trained(x).argmax(axis=1) == (x[:, 0] > 0)).mean() > 0.95
