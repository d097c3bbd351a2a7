"""Gradients that add up over batches are those of the large batch."""

import numpy as np
import pytest

from edgeasync import SGD, Hub, join
from edgeasync.async_train import AsyncGradientAccumulator, nn, optim
from edgeasync.errors import ConfigError


def images(count=96, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 1, 8, 8)).astype(np.float32), random.integers(0, 3, count)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3), input_shape=(1, 8, 8), seed=4
    )


class Line:
    """A custom model: its loss is its own."""

    def __init__(self):
        self.parameters = {"weight": np.ones(64, np.float32), "bias": np.zeros(1, np.float32)}

    def gradient(self, arrays, x, y):
        rows = x.reshape(len(x), -1)
        error = rows @ arrays["weight"] + arrays["bias"] - y
        return float(error @ error) / len(y), {"weight": 2 * rows.T @ error / len(y), "bias": [2 * error.mean()]}


def values(model):
    found = model.parameters if isinstance(model, Line) else model.state_dict()
    return np.concatenate([np.ravel(array) for array in found.values()])


@pytest.mark.parametrize("make", [convolutions, Line])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=[1.0, 0.2, 3.0])])
@pytest.mark.parametrize("sizes", [(32, 32, 32), (50, 30, 16)])
def test_accumulated_gradients_are_those_of_the_large_batch(make, loss_fn, sizes):
    x, y = images()
    together, parts = make(), make()
    start = values(together)
    large = AsyncGradientAccumulator(together, accumulation_steps=1)
    large.train_step(x, y, optimizer=optim.SGD(lr=1.0), loss_fn=loss_fn)
    small, ends = AsyncGradientAccumulator(parts, accumulation_steps=3), np.cumsum(sizes)
    optimizer = optim.SGD(lr=1.0)
    for begin, end in zip([0, *ends], ends, strict=False):
        assert np.array_equal(values(parts), start)
        small.train_step(x[begin:end], y[begin:end], optimizer=optimizer, loss_fn=loss_fn)
    assert small.is_update_step()
    scale = np.abs(values(together) - start).max()
    assert np.abs(values(parts) - values(together)).max() <= 1e-6 * max(1.0, scale)


@pytest.mark.parametrize("make", [convolutions, Line])
def test_edgeasyncs_own_optimizer_keeps_its_momentum(make):
    found = []
    for optimizer in (SGD(learning_rate=1e-3, momentum=0.9), optim.SGD(lr=1e-3, momentum=0.9)):
        model = make()
        accumulator = AsyncGradientAccumulator(model, accumulation_steps=1)
        for number in range(3):
            accumulator.train_step(*images(seed=number), optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
        found.append(values(model))
    np.testing.assert_array_equal(*found)


def test_a_step_comes_after_so_many_batches_and_at_the_end_of_the_data():
    x, y = images(8)
    accumulator = AsyncGradientAccumulator(convolutions(), base_batch_size=2, target_batch_size=6)
    optimizer, updates = optim.Adam(lr=0.01), []
    for begin in range(0, 8, 2):
        accumulator.train_step(x[begin : begin + 2], y[begin : begin + 2], optimizer=optimizer)
        updates.append(accumulator.is_update_step())
    assert updates == [False, False, True, False]
    accumulator.finish(optimizer)
    assert accumulator.is_update_step()
    assert accumulator.steps == 2
    accumulator.finish(optimizer)
    assert accumulator.steps == 2


class Clock:
    """A clock that a computing batch, and a step, move by what they take."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Link:
    """What `join` returns, as far as an accumulator uses it: an exchange takes its time."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.told = clock, seconds, []

    def step(self, loss=None, examples=0):
        self.clock.now_s += self.seconds
        self.told.append(examples)


class Slow(Line):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def gradient(self, arrays, x, y):
        self.clock.now_s += self.seconds
        return super().gradient(arrays, x, y)


def paced(batch_s, exchange_s):
    clock = Clock()
    model, link = Slow(clock, batch_s), Link(clock, exchange_s)
    accumulator = AsyncGradientAccumulator(
        model,
        base_batch_size=4,
        target_batch_size=64,
        adaptive_accumulation=True,
        session=link,
        clock=clock,
    )
    optimizer = optim.SGD(lr=1e-4)
    x, y = images(4)
    for _ in range(80):
        accumulator.train_step(x, y, optimizer=optimizer)
    return link.told


def test_adaptive_accumulation_follows_the_speed_of_computing_and_of_the_link():
    assert paced(batch_s=1.0, exchange_s=0.1)[-1] == 4  # an exchange is cheap beside one batch
    assert paced(batch_s=1.0, exchange_s=1.0)[-1] == 36  # nine batches for one exchange: a tenth of the time
    assert paced(batch_s=0.5, exchange_s=0.5)[-1] == 36
    assert paced(batch_s=0.1, exchange_s=9.0)[-1] == 64  # never more than the target


def test_steps_are_exchanged_with_a_hub(tmp_path):
    x, y = images(64)
    model = convolutions()
    with Hub(model, run=tmp_path / "run", bind="tcp://127.0.0.1:*") as hub:
        with join(hub.address, model.network.arrays, local_steps_max=2) as session:
            accumulator = AsyncGradientAccumulator(model, accumulation_steps=4, session=session)
            optimizer = optim.SGD(lr=0.5)
            for _ in range(6):
                for begin in range(0, 64, 16):
                    part = slice(begin, begin + 16)
                    accumulator.train_step(x[part], y[part], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
        assert session.steps == accumulator.steps == 6
        assert hub.status()["version"] > 0


def test_mistakes_are_named():
    for arguments in ({}, {"base_batch_size": 4}, {"accumulation_steps": 2, "target_batch_size": 4}):
        with pytest.raises(ConfigError, match="pass accumulation_steps, or"):
            AsyncGradientAccumulator(convolutions(), **arguments)
    with pytest.raises(ConfigError, match="accumulation_steps is 0"):
        AsyncGradientAccumulator(convolutions(), accumulation_steps=0)
    accumulator = AsyncGradientAccumulator(convolutions(), accumulation_steps=1)
    with pytest.raises(ConfigError, match="optimizer is int"):
        accumulator.train_step(*images(2), optimizer=3)
