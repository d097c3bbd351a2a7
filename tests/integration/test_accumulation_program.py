"""The reference's program of gradient accumulation, on an IDX copy of the digits."""

import numpy as np
import pytest

from edgeasync.async_train import AsyncGradientAccumulator, cuda, data, nn, optim
from tests.support.idx_digits import write_idx_digits

EPOCHS = 30


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), seed=1)


def accuracy(model, held_out):
    model.eval()
    right = sum((model(inputs).argmax(axis=1) == targets).sum() for inputs, targets in held_out)
    return right / len(held_out.dataset)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulation_steps": 4},
        {"base_batch_size": 16, "target_batch_size": 64},
        {"base_batch_size": 16, "target_batch_size": 64, "adaptive_accumulation": True},
    ],
)
def test_the_program_reaches_what_a_loop_of_large_batches_reaches(tmp_path, arguments):
    root = str(write_idx_digits(tmp_path, zipped=True))
    device = "cuda" if cuda.is_available() else "cpu"
    prepare = data.transforms.Compose([data.transforms.ToTensor(), data.transforms.Normalize((0.5,), (0.5,))])
    digits = data.MNIST(root=root, train=True, download=True, transform=prepare)
    held_out = data.DataLoader(data.MNIST(root=root, train=False, transform=prepare), batch_size=100)
    half = data.Subset(digits, np.arange(0, len(digits), 2))

    alone, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for inputs, targets in data.DataLoader(half, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss_fn(alone(inputs), targets).backward()
            optimizer.step()

    model = network().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulator = AsyncGradientAccumulator(model, **arguments)
    loader = data.DataLoader(half, batch_size=16, shuffle=True, num_workers=2, pin_memory=True)
    updates = 0
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            accumulator.train_step(inputs.to(device), targets.to(device), optimizer=optimizer, loss_fn=loss_fn)
            updates += accumulator.is_update_step()
    if "adaptive_accumulation" not in arguments:
        assert updates == EPOCHS * len(loader) // 4
        assert accuracy(model, held_out) >= accuracy(alone, held_out) - 0.01
    assert updates == accumulator.steps
    assert accuracy(model, held_out) > 0.85
