"""`AsyncTrainer` and `AsyncTrainingMonitor`: exchanges rare after the warm-up, and thresholds that are crossed."""

import asyncio
import contextlib
import math
import threading

import numpy as np
import pytest

from edgeasync.async_train import AsyncTrainer, AsyncTrainingMonitor, communication, ignored, nn, optim
from edgeasync.errors import ConfigError
from edgeasync.sdk.joined_loop import JoinedLoop
from tests.support.programs.killed_training import Logistic, examples

BATCH_SIZE = 10
STEPS_PER_EPOCH = 33


def network():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4), seed=1)


@pytest.mark.parametrize("waits", [True, False], ids=["train", "train_async"])
def test_all_exchange_in_rounds_at_first_and_rarely_later(waits):
    trainer = AsyncTrainer(network(), 2, 4, 12, workers=2)
    arguments = {"epochs": 12, "optimizer": optim.SGD(lr=0.1), "loss_fn": nn.CrossEntropyLoss()}
    arguments |= {"batch_size": BATCH_SIZE, "evaluate": examples()}
    if waits:
        run = trainer.train(examples(), **arguments)
    else:
        run = asyncio.run(trainer.train_async(examples(), **arguments))
    history = run.history
    for device in ("worker-1", "worker-2"):
        steps = list(history["local_steps"][history["device"] == device])
        warm = steps.count(4)
        assert steps[: warm + 1] == [4] * warm + [8], "twice as many at most"
        assert warm >= 2 * STEPS_PER_EPOCH // 2 // 4
        assert set(steps[warm + 1 :]) == {12}
    assert run.accuracy > 0.9
    x, y = examples()
    found = trainer.model(x).argmax(1)
    assert (found == y).mean() == pytest.approx(run.accuracy), "the model has the trained values"


@pytest.mark.parametrize("make", [network, Logistic])
def test_a_step_at_a_time(make, caplog):
    ignored.say_once.cache_clear()  # another test may have been told
    x, y = examples()
    for steps_per_epoch in (STEPS_PER_EPOCH, None):
        trainer = AsyncTrainer(make(), 1, 3, 11, steps_per_epoch=steps_per_epoch)
        optimizer = optim.SGD(lr=0.1)
        losses = [trainer.train_step(x, y, optimizer, nn.CrossEntropyLoss()) for _ in range(70)]
        history = trainer.close().history
        assert losses[-1] < 0.7 * losses[0]
        steps = list(history["local_steps"])[:-1]  # the last update has what is left
        assert steps == ([3] * 11 + [6, 11, 11] if steps_per_epoch else [11] * 6), "never more than twice as many"
    assert "warm_up_epochs is ignored: set steps_per_epoch" in caplog.text


@pytest.mark.parametrize(("of", "name"), [(communication, "join"), (JoinedLoop, "_send_last_steps")])
def test_a_trainer_that_cannot_begin_or_end_leaves_no_hub(monkeypatch, of, name):
    def fails(*_, **__):
        raise RuntimeError("no session")

    monkeypatch.setattr(of, name, fails)
    trainer = AsyncTrainer(network(), 0)
    with pytest.raises(RuntimeError, match="no session"), contextlib.closing(trainer):
        trainer.train_step(*examples(), optim.SGD(lr=0.1), nn.CrossEntropyLoss())
    assert "edgeasync-hub" not in {thread.name for thread in threading.enumerate()}


def test_the_hub_tells_what_is_over_a_threshold_and_exchanges_more_often():
    trainer = AsyncTrainer(network(), 0, 4, 12)
    monitor, told = AsyncTrainingMonitor(trainer, ["loss"], alert_threshold=0.01), []
    monitor.on_alert(told.append)
    x, y = examples()
    for _ in range(60):
        trainer.train_step(x, y, optim.SGD(lr=0.01), nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match="before the first train_step"):
        AsyncTrainingMonitor(trainer)
    steps = trainer.close().history["local_steps"]
    assert monitor.alerts == told
    assert [alert.detail[:8] for alert in told[:1]] == ["the loss"]
    assert set(steps[2:]) == {6}


@pytest.mark.parametrize(
    ("metrics", "losses", "wanted"),
    [
        (["loss"], [1.0, 3.0, 3.5, 1.0, 4.0], ["the loss is 3 (", "the loss is 4 ("]),
        (["loss_variance"], [1.0, 1.1, 1.0, 9.0], ["the loss_variance is 11.9"]),
        (["loss", "loss_variance"], [1.0, math.nan], ["the loss is nan", "the loss_variance is inf"]),
        (["loss_variance"], [1.0] * 20, []),
    ],
)
def test_losses_over_a_threshold_are_told_once_for_as_long_as_they_last(metrics, losses, wanted):
    monitor = AsyncTrainingMonitor(None, metrics, alert_threshold=2.0, remediation_strategy="alert")
    calm = [monitor.step(loss) for loss in losses]
    assert all(calm) is not bool(wanted)
    for alert, beginning in zip(monitor.alerts, wanted, strict=True):
        assert alert.detail.startswith(beginning)


def test_a_model_goes_back_to_its_last_calm_values():
    model, optimizer = network(), optim.SGD(lr=0.1)
    monitor = AsyncTrainingMonitor(
        model, ["loss", "gradient_norm"], {"loss": 2.0, "gradient_norm": 5.0}, "rollback"
    )
    x, y = examples()
    assert monitor.step(1.0)
    before = model.state_dict()
    model.backward(x, y, "cross_entropy")
    optimizer.update(model.network.spec, model.network.vector, 100.0 * model.gradient_sum)
    assert not np.array_equal(model.state_dict()["0.weight"], before["0.weight"])
    assert not monitor.step(3.0)
    np.testing.assert_array_equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_long_gradient_is_told():
    model = network()
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"], alert_threshold=0.01, remediation_strategy="alert")
    assert monitor.step(1.0), "there is no gradient yet"
    model.backward(*examples(), "cross_entropy")
    assert not monitor.step(1.0)
    assert monitor.alerts[0].detail.startswith("the gradient_norm is")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"divergence_metrics": ["speed"]}, "divergence_metrics contains 'speed'"),
        ({"alert_threshold": -1.0}, "alert_threshold is -1.0"),
        ({"remediation_strategy": "pray"}, "remediation_strategy is 'pray'"),
    ],
)
def test_a_mistake_is_told(arguments, words):
    with pytest.raises(ConfigError, match=words):
        AsyncTrainingMonitor(None, **arguments)
