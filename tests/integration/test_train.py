"""`train`: a hub and its workers in one process, from a call to a trained model."""

import asyncio
import gc
import logging
import re
import signal
import threading
import time

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edgeasync import Dataset, EdgeAsyncError, GradientTrainer, Run, StepResult, Stop, nn, train, train_async
from edgeasync.data import batches, dirichlet
from edgeasync.errors import ConfigError, DataError, ModelMismatchError, StorageError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.model_file import MODEL_FILE, load_model
from edgeasync.sdk import events
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from tests.support.processes import PATIENCE_S

SMALL = SoftmaxModel(inputs=4, classes=2)
DATA = Dataset.of(np.eye(4), [0, 1, 0, 1])
ONE_BY_ONE = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=16))
ARRAYS = dict(SMALL.spec.views(SMALL.initial(0)))


def digits():
    """Digits to train on, and digits held out."""
    found = load_digits()
    data = Dataset.of((found.data / 16).astype(np.float32), found.target)
    order = np.random.default_rng(0).permutation(len(data))
    return data.take(order[360:]), data.take(order[:360])


def trainer_of(model, data, seed=0):
    return GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], batches(data, 32, seed))


class Own:
    """Softmax regression as a user would write it."""

    def __init__(self, inputs=4, classes=2):
        self.parameters = {"weight": np.zeros((inputs, classes)), "bias": np.zeros(classes)}

    def scores(self, arrays, x):
        return x @ arrays["weight"] + arrays["bias"]

    def predict(self, arrays, x):
        return self.scores(arrays, x).argmax(axis=1)

    def gradient(self, arrays, x, y):
        scores = self.scores(arrays, x)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        share = odds / odds.sum(axis=1, keepdims=True)
        loss = -np.log(share[np.arange(len(y)), y] + 1e-12).mean()
        share[np.arange(len(y)), y] -= 1.0
        return loss, {"weight": x.T @ share / len(y), "bias": share.mean(axis=0)}


class Failing:
    """A trainer that works for a while, then raises."""

    spec = SMALL.spec

    def __init__(self, error):
        self._error = error
        self._steps = 0

    def begin(self, parameters):
        pass

    def step(self):
        self._steps += 1
        if self._steps > 40:
            raise self._error
        return StepResult(1.0, 1)


class Solver:
    """A trainer that gets enough local steps to solve its problem every time."""

    spec = SMALL.spec

    def __init__(self, solution):
        self._solution = solution

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        loss = float(np.square(self._parameters - self._solution).mean())
        self._parameters[:] = self._solution
        return StepResult(loss, 1)


# -- what it trains --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, ONE_BY_ONE], ids=["default", "one by one"])
def test_three_workers_learn_the_digits(tmp_path, policy):
    rest, held_out = digits()
    model = MlpModel(inputs=64, hidden=(64,), classes=10)
    seen = []
    run = train(
        model,
        dirichlet(rest, 3, 0.5, 0, examples_min=32),
        evaluate=held_out,
        run=tmp_path,
        until=Stop(updates=300),
        policy=policy,
        callbacks=[seen.append],
    )
    assert run.accuracy >= 0.9
    assert 300 <= run.updates < 303
    assert policy is None or run.version == run.updates
    assert sum(device["updates_applied"] for device in run.devices) == run.updates
    assert run.reason == f"{run.updates} updates applied"
    assert run.model is model
    kinds = [type(event) for event in seen]
    assert kinds.count(events.Join) == 3
    assert kinds.count(events.Version) == run.version
    assert kinds.count(events.Update) == run.updates
    assert kinds[-1] is events.End
    assert [
        event for event in seen if not isinstance(event, events.Update | events.Version | events.End)
    ] == run.events
    vector, version = load_model(tmp_path / MODEL_FILE, model.spec)
    assert (version, dict(model.spec.views(vector)).keys()) == (run.version, run.arrays.keys())
    assert all(np.array_equal(array, run.arrays[name]) for name, array in model.spec.views(vector).items())


def test_layers_are_trained_exported_and_opened(tmp_path):
    rest, held_out = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    run = train(
        model, (rest.x, rest.y), evaluate=(held_out.x, held_out.y), until=Stop(epochs=2), run=tmp_path / "run"
    )
    assert run.reason == "2 passes over the data"
    opened = Run.open(tmp_path / "run")
    assert (opened.version, opened.model.SerializeToString()) == (run.version, run.model.SerializeToString())
    assert run.export(tmp_path / "model.onnx").read_bytes() == run.model.SerializeToString()


def test_a_model_of_ones_own(tmp_path):
    rest, held_out = digits()
    run = train(Own(64, 10), rest, evaluate=held_out, until=Stop(epochs=10), optimizer=SGD(learning_rate=0.2))
    assert run.accuracy > 0.85
    assert run.model.keys() == {"weight", "bias"}
    with pytest.raises(ConfigError, match=r"only models of ONNX .* save run\.arrays"):
        run.export(tmp_path / "model.onnx")


def test_a_function_evaluates_and_when_ends():
    found = []
    run = train(
        Own(),
        DATA,
        workers=2,
        evaluate=lambda arrays: float(np.abs(arrays["weight"]).sum()),
        until=Stop(when=lambda progress: found.append(progress) or progress.version >= 5),
    )
    assert run.reason == "Stop(when=) said so"
    assert [progress.version for progress in found][:5] == [1, 2, 3, 4, 5]
    assert run.loss == pytest.approx(float(np.abs(run.arrays["weight"]).sum()))


def test_devices_that_solve_their_problem_in_every_interval_do_not_make_the_default_diverge():
    solution = np.linspace(-1.0, 1.0, SMALL.spec.length, dtype=np.float32)
    run = train(ARRAYS, [Solver(solution) for _ in range(3)], until=Stop(updates=300))
    assert np.abs(SMALL.spec.flatten(run.arrays) - solution).max() < 1e-2
    assert not [event for event in run.events if isinstance(event, events.Alert)]
    assert not any(device["updates_rejected"] for device in run.devices)


def test_a_second_call_goes_on_from_the_run(tmp_path):
    for updates in (10, 20, 20):
        run = train(SMALL, [DATA], run=tmp_path, until=Stop(updates=updates))
        assert updates <= run.updates < updates + 3
    again = train(SMALL, [DATA], run=tmp_path, until=Stop(updates=20))
    assert again.updates == run.updates
    assert all(np.array_equal(array, run.arrays[name]) for name, array in again.arrays.items())


def test_an_accuracy_ends_it():
    rest, held_out = digits()
    often = {"evaluation": {"every": "5 updates"}}
    run = train(
        SoftmaxModel(inputs=64, classes=10), rest, evaluate=held_out, until=Stop(accuracy=0.5), settings=often
    )
    assert run.accuracy > 0.4
    assert re.fullmatch(r"accuracy \d+\.\d+% is at least 50\.00%", run.reason)


@pytest.mark.parametrize(("settings", "until"), [({}, Stop(updates=20)), ({"every": "5 updates"}, Stop(loss=1e9))])
def test_it_ends_at_a_condition(settings, until):
    run = train(SMALL, [DATA], until=until, policy=ONE_BY_ONE, settings={"evaluation": settings})
    assert run.updates == (20 if until.updates else 5)


# -- callbacks -------------------------------------------------------------------------------------------


def test_callbacks_disturb_nothing(caplog):
    release, told = threading.Event(), []

    class Odd:
        def on_version(self, event):
            release.wait(PATIENCE_S)

        def on_join(self, event):
            raise ZeroDivisionError

        def on_end(self, event):
            told.append(event)

    with caplog.at_level(logging.ERROR, "edgeasync"):
        began_s = time.monotonic()
        run = train(
            SMALL, DATA, workers=2, callbacks=[Odd(), lambda _: None],
            until=Stop(when=lambda progress: progress.updates >= 30 and (release.set() or True)),
        )  # fmt: skip
    assert run.updates >= 30
    assert time.monotonic() - began_s < PATIENCE_S
    (record,) = caplog.records
    assert "Odd failed on Join(" in record.message, "once, though two devices joined"
    assert [event.reason for event in told] == ["Stop(when=) said so"]


def test_what_is_no_callback_is_refused():
    with pytest.raises(ConfigError, match="the callback int has none of the methods on_join"):
        train(SMALL, DATA, callbacks=[3])


# -- mistakes --------------------------------------------------------------------------------------------


class NoGradient:
    parameters = ARRAYS


class Wrong(Own):
    def gradient(self, arrays, x, y):
        loss, gradients = super().gradient(arrays, x, y)
        return loss, {**gradients, "bias": np.zeros(3)}


class Missing(Own):
    def gradient(self, arrays, x, y):
        loss, gradients = super().gradient(arrays, x, y)
        del gradients["bias"]
        return loss, gradients


class Scores(Own):
    def predict(self, arrays, x):
        return self.scores(arrays, x)


class Integers(Own):
    def __init__(self):
        self.parameters = {"weight": np.zeros((4, 2), np.int64)}


MISTAKES = {
    "no method": ({"model": NoGradient()}, ConfigError, r"has no method `gradient\(arrays, x, y\)`"),
    "wrong gradient": ({"model": Wrong()}, ConfigError, r"the gradient of 'bias' has shape \(3,\), not \(2,\)"),
    "missing gradient": ({"model": Missing()}, ConfigError, "returned no gradient of 'bias'"),
    "integers": ({"model": Integers()}, ConfigError, "'weight' is int64; give floats"),
    "no model": ({"model": 3}, ConfigError, "the model int is no model; give layers of edgeasync.nn"),
    "no file": ({"model": "missing.onnx"}, ConfigError, r"missing\.onnx: no such file"),
    "no data file": ({"data": "missing.npz"}, DataError, r"missing\.npz: no such file"),
    "empty": ({"data": []}, ConfigError, "the list of data is empty"),
    "NaN": ({"data": (np.full((4, 4), np.nan), [0, 1, 0, 1])}, DataError, "the data: x has values that are not"),
    "kind of data": ({"data": 3}, DataError, "the data is int; give a Dataset"),
    "features": ({"data": (np.eye(3), [0, 1, 0]), "workers": 1}, DataError, "3 features"),
    "workers": ({"workers": 0}, ConfigError, "workers is 0; give 1 or more"),
    "too many workers": ({"workers": 9}, DataError, "4 examples"),
    "two counts": ({"data": [DATA], "workers": 2}, ConfigError, "workers is 2, but there are data of 1"),
    "no end": ({"until": Stop()}, ConfigError, "until says nothing"),
    "end": ({"until": Stop(updates=0)}, ConfigError, "until"),
    "batch": ({"batch_size": 0}, ConfigError, "batch_size"),
    "section": ({"settings": {"codecs": {}}}, ConfigError, "codecs"),
    "said twice": ({"settings": {"hub": {"stop": {}}}}, ConfigError, "hub.stop: that is said by an argument"),
    "accuracy": ({"until": Stop(accuracy=0.9)}, ConfigError, "accuracy"),
    "loss": ({"loss": "mse"}, ConfigError, "has the loss cross_entropy"),
    "passes of trainers": (
        {"model": ARRAYS, "data": [trainer_of(SMALL, DATA)], "until": None},
        ConfigError,
        r"do not say how much data they have; give Stop\(updates=\.\.\.\)",
    ),
    "classes": ({"model": Scores(), "evaluate": DATA}, ConfigError, r"predict returned shape \(1, 2\) for 1"),
    "no evaluation": ({"evaluate": lambda _: "good"}, ConfigError, "evaluate returned str; return a loss"),
    "percent": ({"evaluate": lambda _: (0.1, 95.0)}, ConfigError, "accuracy 95; return a share from 0 to 1"),
    "until": ({"until": 100}, ConfigError, r"until is int; give Stop\(updates=100\)"),
    "policy": ({"policy": "quorum"}, ConfigError, "policy is str; give a Policy"),
    "settings": ({"settings": "hub.toml"}, ConfigError, "settings is str; give a table"),
    "unknown loss": ({"loss": "nll"}, ConfigError, "loss"),
    "optimizer": ({"optimizer": SGD}, ConfigError, "optimizer is <class .*; give SGD"),
    "callbacks": ({"callbacks": print}, ConfigError, "callbacks is builtin_function_or_method; give a list"),
    "run": ({"run": 5}, ConfigError, "run is 5; give the path of a folder"),
    "arrays alone": ({"model": ARRAYS}, ConfigError, "named arrays alone cannot be trained on data"),
    "trainer": (
        {"model": ARRAYS, "data": [trainer_of(SoftmaxModel(inputs=4, classes=3), DATA)]},
        ModelMismatchError,
        "trainer 1 has other arrays",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(given, error, words, tmp_path):
    asked = {"model": SMALL, "data": DATA, "until": Stop(updates=1), "run": tmp_path / "run"} | given
    with pytest.raises(error, match=words) as caught:
        train(asked.pop("model"), asked.pop("data"), **asked)
    assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(StorageError):
        Run.open(tmp_path / "nothing")
    train(SMALL, [DATA], run=tmp_path / "run", until=Stop(updates=1))
    with pytest.raises(EdgeAsyncError):
        train(Own(), [DATA], run=tmp_path / "run", until=Stop(updates=2))


@pytest.mark.parametrize(
    "error",
    [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
def test_a_trainer_may_raise_what_no_task_can(error):
    trainers = [trainer_of(SMALL, DATA), Failing(error), trainer_of(SMALL, DATA)]
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*test_train.py.*in step"):
        train(ARRAYS, trainers, until=Stop(updates=10**9))


def test_batches_that_come_to_their_end_are_a_clear_error():
    trainer = GradientTrainer(SMALL.spec, SMALL.gradient, [SGD(learning_rate=0.1)], iter([(DATA.x, DATA.y)] * 3))
    with pytest.raises(EdgeAsyncError, match="never end"):
        train(ARRAYS, [trainer], until=Stop(updates=10**9))


@pytest.mark.parametrize("error", [ValueError("the sensor is gone"), EdgeAsyncError("no more data")], ids=repr)
def test_what_a_trainer_raises_comes_out(error):
    with pytest.raises(type(error), match=str(error)) as caught:
        train(ARRAYS, [trainer_of(SMALL, DATA), Failing(error)], until=Stop(updates=10**9))
    assert caught.value.__notes__ == ["raised in worker-2"]


# -- where it runs ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_running_loop_is_no_obstacle():
    assert train(SMALL, [DATA], until=Stop(updates=3)).updates >= 3
    assert (await train_async(SMALL, [DATA], until=Stop(updates=3))).updates >= 3
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.asyncio
async def test_training_that_is_cancelled_leaves_the_newest_model(tmp_path):
    loop, well_on = asyncio.get_running_loop(), asyncio.Event()

    def watch(progress):
        if progress.version == 10:
            loop.call_soon(well_on.set)

    training = asyncio.create_task(
        train_async(SMALL, [DATA], run=tmp_path, until=Stop(when=watch), policy=ONE_BY_ONE)
    )
    async with asyncio.timeout(PATIENCE_S):
        await well_on.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    left = Run.open(tmp_path).version
    assert left >= 10
    assert (await train_async(SMALL, [DATA], run=tmp_path, until=Stop(updates=left + 3))).version >= left + 3


def test_an_interrupt_leaves_the_newest_model(tmp_path):
    def interrupt(progress):
        if progress.version == 10:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(SMALL, [DATA], run=tmp_path, until=Stop(when=interrupt), policy=ONE_BY_ONE)
    assert Run.open(tmp_path).version >= 10


def test_nothing_is_left_behind():
    def left():
        gc.collect()
        return threading.active_count()

    train(SMALL, DATA, until=Stop(updates=2))
    before = left()
    runs = [train(SMALL, DATA, until=Stop(updates=2)) for _ in range(5)]
    assert left() == before
    paths = [run.path for run in runs]
    assert all(path.exists() for path in paths)
    del runs
    gc.collect()
    assert not any(path.exists() for path in paths)
