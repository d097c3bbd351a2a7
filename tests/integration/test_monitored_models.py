"""A monitor of a model: whatever trains the model carries the remedy out, at the hub and at the workers."""

import gc
import weakref

import numpy as np
import pytest

from edgeasync.async_train import (
    AsyncGradientAccumulator,
    AsyncModelAverager,
    AsyncTrainer,
    AsyncTrainingMonitor,
    AsyncWorker,
    FaultTolerantTrainer,
    ParameterServer,
    async_sgd,
    ignored,
    nn,
    optim,
)
from edgeasync.async_train.watching import WATCHED

X, Y = np.eye(4, dtype=np.float32), np.arange(4) % 2
STEPS = 40
RATE = 1.0


class Slope:
    """A model whose loss is always 1, and whose gradient is 1: a step moves it by the learning rate."""

    def __init__(self):
        self.parameters = {"w": np.zeros((1,), np.float32)}

    def gradient(self, arrays, x, y):
        return 1.0, {"w": np.ones_like(arrays["w"])}


def monitor_of(model, remedy):
    """Return a monitor that is always alarmed."""
    return AsyncTrainingMonitor(
        model=model, divergence_metrics=["loss"], alert_threshold=0.5, remediation_strategy=remedy
    )


def serve(model, monitored, folder):
    server = ParameterServer(model=model, port=0)
    monitor = monitored(model)  # before the server starts
    with server:
        AsyncWorker(server.hub.address, 4, model=Slope()).train((X, Y), epochs=STEPS, optimizer=optim.SGD(lr=RATE))
    return monitor


def average(model, monitored, folder):
    monitor = monitored(model)
    with AsyncModelAverager(model, master="127.0.0.1:*", averaging_frequency=4) as averager:
        for _ in range(STEPS):
            averager.train_step(X, Y, optimizer=optim.SGD(lr=RATE))
    return monitor


def train_with_several(model, monitored, folder):
    trainer = AsyncTrainer(model, 0, 4, 4, workers=1)
    monitor = monitored(model)
    trainer.train((X, Y), epochs=STEPS, optimizer=optim.SGD(lr=RATE), batch_size=4)
    return monitor


def train_step_by_step(model, monitored, folder):
    trainer = AsyncTrainer(model, 0, 4, 4)
    monitor = monitored(model)
    for _ in range(STEPS):
        trainer.train_step(X, Y, optim.SGD(lr=RATE))
    trainer.close()
    return monitor


def train_to_survive(model, monitored, folder):
    monitor = monitored(model)
    trainer = FaultTolerantTrainer(model, folder, update_frequency=4)
    trainer.train((X, Y), epochs=STEPS, optimizer=optim.SGD(lr=RATE), batch_size=4)
    return monitor


def train_processes(model, monitored, folder):
    monitor = monitored(model)
    async_sgd(
        model,
        (X, Y),
        num_workers=1,
        num_epochs=STEPS,
        lr=RATE,
        engine="tasks",
        optimizer=optim.SGD(lr=RATE, momentum=1e-9),
    )
    return monitor


TRAINED = [serve, average, train_with_several, train_step_by_step, train_to_survive, train_processes]


@pytest.mark.parametrize("train", TRAINED)
def test_reduced_rates_reach_the_workers(train, tmp_path):
    model, calm = Slope(), Slope()
    train(calm, lambda model: monitor_of(model, "alert"), tmp_path / "calm")
    monitor = train(model, lambda model: monitor_of(model, "reduce_lr"), tmp_path / "alarmed")
    assert monitor.alerts[0].detail.endswith("the devices' learning rates are halved")
    moved, whole = -float(model.parameters["w"][0]), -float(calm.parameters["w"][0])
    assert whole == pytest.approx(STEPS * RATE, rel=0.05)
    assert whole / 2 < moved < 0.8 * whole, "but the steps before the alarm"


def test_a_loop_of_ones_own_has_its_optimizers_rate_reduced():
    for steps_by_hand in (True, False):
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        monitor, moves = monitor_of(model, "reduce_lr"), []
        accumulator = AsyncGradientAccumulator(model, 1)
        for loss in (0.1, 0.2, 9.0, 9.0):
            before = model.network.vector.copy()
            model.network.vector[:] = 0.0
            if steps_by_hand:
                optimizer.zero_grad()
                model.backward(X, Y, "cross_entropy")
                optimizer.step()
            else:
                accumulator.train_step(X, Y, optimizer=optimizer)
            moves.append(float(np.linalg.norm(model.network.vector)))
            model.network.vector[:] = before
            monitor.step(loss)
        np.testing.assert_allclose(moves, [moves[0], moves[0], moves[0], moves[0] / 2], rtol=1e-5)


def test_what_nothing_can_follow_is_said(caplog):
    ignored.say_once.cache_clear()
    for remedy in ("reduce_lr", "increase_sync_frequency"):
        model = nn.Sequential(nn.Linear(4, 2))
        monitor_of(model, remedy).step(1.0)
    assert len([line for line in caplog.messages if "it cannot be applied" in line]) == 1, caplog.messages


def test_a_monitor_keeps_no_model_alive():
    model = nn.Sequential(nn.Linear(4, 2))
    monitor, gone = monitor_of(model, "alert"), weakref.ref(model)
    number = id(model)
    del model
    gc.collect()
    assert gone() is None
    assert number not in WATCHED._watchers
    assert not monitor.step(1.0), "losses are still watched"
