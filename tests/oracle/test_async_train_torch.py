"""Torch modules in the toolbox: averaged by Bagua's face, and trained through a parameter server."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgeasync.async_train import (
    AsyncModelAverageAlgorithm,
    AsyncModelAverager,
    AsyncWorker,
    ParameterServer,
    data,
    init_distributed,
    optim,
)
from edgeasync.errors import ConfigError
from examples.async_train.digits_idx import digits
from tests.support.programs.processes import free_address

EPOCHS = 20
POINT = 0.01


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )


def tensors(part):
    images, labels = part
    return torch.utils.data.TensorDataset(
        torch.from_numpy(images / np.float32(255.0)), torch.from_numpy(labels.astype(np.int64))
    )


TRAIN, TEST = map(tensors, digits())


def loader(number=0, of=1):
    part = torch.utils.data.Subset(TRAIN, range(number, len(TRAIN), of))
    return torch.utils.data.DataLoader(part, batch_size=32, shuffle=True)


def accuracy(module):
    x, y = TEST.tensors
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def train(module, loader, optimizer):
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several loops share the cores
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sequential():
    """The lowest accuracy of one loop over three orders of the examples: the order alone moves it by a point."""
    found = []
    for seed in range(3):
        module = network()
        torch.manual_seed(seed)
        train(module, loader(), torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
        found.append(accuracy(module))
    return min(found)


def test_a_module_with_bagua_leaves_and_returns(monkeypatch):
    address = free_address().removeprefix("tcp://")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    init_distributed(master_addr=address.partition(":")[0], master_port=int(address.partition(":")[2]))
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=1)
    module = module.with_bagua([optimizer], algorithm)
    session = algorithm.communication(module).session
    train(module, loader(of=10), optimizer)
    module.bagua_algorithm.abort(module)
    exchanges = session.exchanges
    assert exchanges > 1
    train(module, loader(of=10), optimizer)
    assert session.exchanges == exchanges
    module.bagua_algorithm.resume(module)
    while session.exchanges == exchanges:  # the hub is on its way
        train(module, loader(of=10), optimizer)
    algorithm.stop(module)
    with pytest.raises(ConfigError, match="does not average this model"):
        algorithm.abort(network())
    with pytest.raises(ConfigError, match="use AsyncModelAverager for other models"):
        module.with_edgeasync([], algorithm)


def test_an_averager_in_one_process(sequential):
    module, optimizer = network(), optim.SGD(lr=0.05, momentum=0.9)
    with AsyncModelAverager(module, master="127.0.0.1:*", averaging_frequency=10) as averager:
        for _ in range(EPOCHS):
            for x, y in loader():
                averager.train_step(
                    x.to(averager.device), y, optimizer=optimizer, loss_fn=torch.nn.CrossEntropyLoss()
                )
    assert averager.evaluate(loader()) > 0.99
    assert accuracy(module) >= sequential - POINT


@pytest.mark.parametrize("travels", [True, False])
def test_a_parameter_server_of_a_module(sequential, travels):
    module, loss_fn = network(), torch.nn.CrossEntropyLoss()
    server = ParameterServer(module, port=0, loss_fn=loss_fn, input_shape=(8, 8) if travels else None)
    with server:
        worker = AsyncWorker(
            server.hub.address, 32, update_frequency=4, model=None if travels else network(), device="cpu"
        )
        optimizer = optim.SGD(lr=0.05, momentum=0.9)
        worker.train(
            dataloader=loader(), epochs=EPOCHS, optimizer=optimizer, loss_fn=loss_fn, metrics=["accuracy"]
        )
        seen = worker.evaluate(data.as_dataset(torch.utils.data.DataLoader(TEST, batch_size=100)))
    assert accuracy(module) == pytest.approx(seen, abs=0.005)
    assert seen >= sequential - POINT
