"""Trainers of torch and of JAX multiply their learning rates by a factor; the optimizer keeps its own."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import edgeasync.jax
import edgeasync.torch
from edgeasync.async_train import AsyncTrainingMonitor
from edgeasync.data.dataset import Dataset
from edgeasync.training.plan import LocalTraining

DATA = Dataset.of(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.float32)[:, None])
LOCAL = LocalTraining(batch_size=4)


def torch_trainer():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return edgeasync.torch.model(module, torch.nn.MSELoss(), optimizer)


def jax_trainer():
    def loss(params, x, y):
        return jax.numpy.mean((x @ params["w"] - y) ** 2)

    return edgeasync.jax.model({"w": np.ones((4, 1), np.float32)}, loss, optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("make", [torch_trainer, jax_trainer])
def test_a_step_is_shorter_by_the_factor(make):
    moves = {}
    for factor in (1.0, 0.5):
        prepared = make().prepare(LOCAL)
        trainer = prepared.make_trainer(DATA, 0, 1)
        vector = prepared.initial.copy()
        trainer.begin(vector)
        trainer.scale_learning_rate(factor)
        trainer.step()
        moves[factor] = vector - prepared.initial
        trainer.scale_learning_rate(1.0)
        if make is torch_trainer:
            assert [group["lr"] for group in trainer._optimizer.param_groups] == [0.1]
    np.testing.assert_allclose(moves[0.5], moves[1.0] / 2, rtol=1e-5, atol=1e-7)


def test_a_monitor_reduces_the_rate_of_the_optimizer_that_steps_its_module():
    module, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, other)]
    monitor = AsyncTrainingMonitor(
        module, divergence_metrics=["loss"], alert_threshold=2.0, remediation_strategy="reduce_lr"
    )
    for loss in (1.0, 3.0, 3.0):
        for each, optimizer in zip((module, other), optimizers, strict=True):
            each(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monitor.step(loss)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.05, 0.1]
