"""`train`: a hub and its workers in one process, from a call to a trained model."""

import asyncio
import gc
import logging
import re
import signal
import threading
import time

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from edgeasync import Dataset, EdgeAsyncError, GradientTrainer, Run, StepResult, Stop, nn, train, train_async
from edgeasync.callbacks import CSVLog, SaveBest, StopWhen
from edgeasync.data import batches, dirichlet, load_digits
from edgeasync.durable.run_events import ReplayedUpdate
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError, DataError, ModelMismatchError, StorageError
from edgeasync.graphs.model_file import load_model
from edgeasync.losses import CrossEntropy, OnnxLoss
from edgeasync.metrics import MAE, TopK
from edgeasync.policies.optimizers import SGD
from edgeasync.runtime.hub_record import read_record
from edgeasync.runtime.hub_start import make_hub
from edgeasync.sdk import events
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from tests.support.models.gradients import forward, numbers
from tests.support.parts.small_runs import MODEL, plain
from tests.support.programs.processes import PATIENCE_S, wait_for_threads

SMALL = MODEL
DATA = Dataset.of(np.eye(4), [0, 1, 0, 1])
ONE_BY_ONE = plain(16)
ARRAYS = dict(SMALL.spec.views(SMALL.initial(0)))


def digits():
    """Digits to train on, and digits held out."""
    data = load_digits()
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
    opened = Run.open(tmp_path)
    assert len(opened.events) > 3
    assert opened.events == run.events
    last = [event for event in run.events if isinstance(event, events.Evaluation)][-1]
    assert (last.version, last.accuracy) == (run.version, run.accuracy)
    assert [device["id"] for device in opened.devices] == [device["id"] for device in run.devices]
    assert sum(device["updates_applied"] for device in opened.devices) == run.updates
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


def test_a_file_is_trained_and_exported(tmp_path):
    nn.save(nn.Linear(4, 2), tmp_path / "forward.onnx", (4,))
    run = train(tmp_path / "forward.onnx", (np.eye(4), [0, 1, 0, 1]), workers=1, until=Stop(updates=2))
    exported = onnx.load(run.export(tmp_path / "trained.onnx"))
    assert exported.SerializeToString() == run.model.SerializeToString()


def test_metrics_come_with_updates_and_outlive_the_run_in_its_journal(tmp_path):
    data, _ = digits()
    seen = []
    train(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), data, metrics=["accuracy", TopK(k=3)],
        loss=CrossEntropy(label_smoothing=0.1), until=Stop(epochs=3), batch_size=64, accumulation_steps=2,
        micro_batch_size=16, run=tmp_path, callbacks=[seen.append],
    )  # fmt: skip
    told = {(event.device, event.number): event.metrics for event in seen if isinstance(event, events.Update)}
    assert all(0.0 <= found["accuracy"] <= found["top_3"] <= 1.0 for found in told.values())
    assert np.mean([found["top_3"] for found in told.values()]) > 0.3, "it learns"
    replay, lines = RunReplay(tmp_path), []
    replay.tell(lambda line: lines.append(line) or True)
    replay.close()
    written = {(line.device, line.seq): line.metrics for line in lines if isinstance(line, ReplayedUpdate)}
    assert written.items() >= told.items()


def test_a_model_of_large_scores_trains_without_metrics():
    text = "h = Mul(x, p)\ns = MatMul(h, w)\ny = Transpose<perm=[0, 2, 1]>(s)"
    weights = {"p": numbers((2,), 1), "w": numbers((2, 20480), 2)}
    model = onnx.load_model_from_string(forward(text, weights, (64, 2)))
    data, seen = (numbers((8, 64, 2), 3), np.arange(8 * 64).reshape(8, 64)), []
    with pytest.raises(ConfigError, match="metrics need all scores of the model"):
        train(model, data, freeze="w", metrics=["accuracy"], until=Stop(updates=1))
    train(model, data, freeze="w", batch_size=4, workers=1, until=Stop(updates=20), callbacks=[seen.append])
    losses = [event.loss for event in seen if isinstance(event, events.Update)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_a_loss_of_ones_own(tmp_path):
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
        own (float[batch, 1] prediction, float[batch, 1] target) => (float total)
        { d = Sub(prediction, target) s = Mul(d, d) r = Sqrt(s) total = ReduceMean<keepdims = 0>(r) }""")
    onnx.save(proto, tmp_path / "loss.onnx")
    x = np.random.default_rng(0).normal(size=(300, 4))
    data = (x, x[:, :1] - x[:, 1:2])
    seen = []
    run = train(
        nn.Linear(4, 1), data, loss=OnnxLoss(file=str(tmp_path / "loss.onnx")), evaluate=data,
        callbacks=[seen.append],
        run=tmp_path / "run", until=Stop(loss=0.1, updates=2000), settings={"evaluation": {"every": "20 updates"}},
    )  # fmt: skip
    assert run.updates < 2000
    assert min(event.loss for event in seen if isinstance(event, events.Evaluation)) <= 0.1
    (tmp_path / "loss.onnx").unlink()
    settings = read_record(tmp_path / "run")
    assert settings.model.loss == OnnxLoss(graph=proto.SerializeToString())
    asyncio.run(make_hub(settings).run())  # whose goal is reached


def test_a_model_of_two_inputs(tmp_path):
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
        g (float[batch, 4] left, float[batch, 4] right) => (float[batch, 2] y) <float[8, 2] w>
        { both = Concat<axis = 1>(left, right) y = MatMul(both, w) }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((8, 2), np.float32), "w"))
    x = np.random.default_rng(0).normal(size=(300, 8))
    data = ({"left": x[:, :4], "right": x[:, 4:]}, x[:, 0] > x[:, 4])
    seen = []
    run = train(
        proto, data, evaluate=data, metrics=["accuracy"], until=Stop(accuracy=0.95, updates=2000),
        settings={"evaluation": {"every": "20 updates"}}, run=tmp_path / "run", callbacks=[seen.append],
    )  # fmt: skip
    assert run.updates < 2000
    assert max(event.accuracy for event in seen if isinstance(event, events.Evaluation)) >= 0.95
    exported = onnx.load(run.export(tmp_path / "two.onnx"))
    assert [entry.name for entry in exported.graph.input] == ["left", "right"]


def test_a_model_of_ones_own(tmp_path):
    rest, held_out = digits()
    run = train(Own(64, 10), rest, evaluate=held_out, until=Stop(epochs=10), optimizer=SGD(learning_rate=0.2))
    assert run.accuracy > 0.85
    assert run.model.keys() == {"weight", "bias"}
    with pytest.raises(ConfigError, match=r"only ONNX and .* as ONNX; .* model\.safetensors or model\.npz"):
        run.export(tmp_path / "model.onnx")
    for name in ("m.pt", "m"):
        with pytest.raises(ConfigError, match=r"m.*: the file name must end in \.onnx, \.safetensors or \.npz"):
            run.export(tmp_path / name)
    for found in (np.load(run.export(tmp_path / "m.npz")), load_file(run.export(tmp_path / "m.safetensors"))):
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in run.arrays.items()
        }


class Places:
    """A model that tells the larger of two numbers, at each of several places."""

    parameters = {"weight": np.ones(2)}  # noqa: RUF012 - as a user writes it

    def gradient(self, arrays, x, y):
        return y.mean(), {"weight": np.zeros(2)}

    def predict(self, arrays, x):
        return (x * arrays["weight"]).argmax(-1)


def test_an_accuracy_of_several_places_is_a_share_of_them():
    x = np.random.default_rng(0).normal(size=(300, 5, 2)).astype(np.float32)
    y = x.argmax(-1)
    y[:, 0] ^= 1  # one place in five is wrong
    run = train(Places(), (x, y), workers=1, evaluate=(x, y), until=Stop(updates=1))
    assert (run.accuracy, run.loss) == (pytest.approx(0.8), pytest.approx(y.mean()))


def test_a_function_evaluates_and_when_ends():
    found = []
    run = train(
        Own(),
        DATA,
        workers=2,
        evaluate=lambda arrays: float(np.abs(arrays["weight"]).sum()),
        until=Stop(when=lambda progress: found.append(progress) or progress.version >= 5),
    )
    assert run.reason == "Stop(when=...) returned true"
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


class Diverging(Own):
    """A model whose loss is NaN after a while."""

    def __init__(self, calls):
        super().__init__()
        self.left = calls

    def gradient(self, arrays, x, y):
        self.left -= 1
        loss, gradients = super().gradient(arrays, x, y)
        return (
            (loss, gradients)
            if self.left > 0
            else (np.nan, {name: value * np.nan for name, value in gradients.items()})
        )


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("calls", [0, 500])
def test_training_that_diverges_ends_and_says_so(workers, calls, caplog):
    run = train(Diverging(calls), DATA, workers=workers, until=Stop(updates=10**9))
    assert run.reason.startswith(
        "diverged: the last 10 updates of every device were not finite; lower the learning"
    )
    assert all(np.isfinite(array).all() for array in run.arrays.values())
    (told,) = [event for event in run.events if isinstance(event, events.Alert) and "diverged" in event.detail]
    assert told.detail == run.reason
    assert run.reason in caplog.messages


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
    assert [event.reason for event in told] == ["Stop(when=...) returned true"]


def test_ready_callbacks_end_a_run_and_keep_its_best_model(tmp_path):
    saver = SaveBest(tmp_path / "best")
    run = train(
        SMALL, DATA, workers=2, evaluate=DATA, until=Stop(updates=10**9), run=tmp_path / "run",
        callbacks=[StopWhen("loss", below=0.5), saver, CSVLog(tmp_path / "log.csv")],
        settings={"evaluation": {"every": "5 updates"}},
    )  # fmt: skip
    assert re.fullmatch(r"loss 0\.\d+ is below 0\.5", run.reason)
    with np.load(saver.saved) as found:
        assert all(
            np.array_equal(found[name], array) for name, array in Run.open(run.path, best=True).arrays.items()
        )
    last = (tmp_path / "log.csv").read_text().splitlines()[-1]
    assert last.endswith(run.reason)


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


class WithScalar:
    def __init__(self):
        self.parameters = {"weight": np.zeros(4), "bias": np.float64(0)}

    def gradient(self, arrays, x, y):
        error = x @ arrays["weight"] + arrays["bias"] - y
        return float(error @ error) / len(y), {"weight": 2 * x.T @ error / len(y), "bias": 2 * error.mean()}


def test_a_parameter_may_be_a_single_number():
    x = np.random.default_rng(0).normal(size=(64, 4))
    run = train(WithScalar(), (x, x[:, 0] + 3.0), workers=1, until=Stop(updates=200))
    assert run.arrays["bias"].shape == ()
    assert run.arrays["bias"] == pytest.approx(3.0, abs=0.2)


MISTAKES = {
    "no method": ({"model": NoGradient()}, ConfigError, r"has no method `gradient\(arrays, x, y\)`"),
    "wrong gradient": ({"model": Wrong()}, ConfigError, r"the gradient of 'bias' has shape \(3,\), not \(2,\)"),
    "missing gradient": ({"model": Missing()}, ConfigError, "returned no gradient for 'bias'"),
    "integers": ({"model": Integers()}, ConfigError, "'weight' is int64; only floats"),
    "no model": ({"model": 3}, ConfigError, "the model int is not a supported model; pass layers of edgeasync.nn"),
    "no file": ({"model": "missing.onnx"}, ConfigError, r"missing\.onnx: no such file"),
    "no data file": ({"data": "missing.npz"}, DataError, r"missing\.npz: no such file"),
    "empty": ({"data": []}, ConfigError, "the list is empty"),
    "NaN": ({"data": (np.full((4, 4), np.nan), [0, 1, 0, 1])}, DataError, "the data: x has values that are not"),
    "kind of data": ({"data": 3}, DataError, "the data is int; pass a Dataset"),
    "features": ({"data": (np.eye(3), [0, 1, 0]), "workers": 1}, DataError, "3 features"),
    "workers": ({"workers": 0}, ConfigError, "workers is 0; pass 1 or more"),
    "too many workers": ({"workers": 9}, DataError, "4 examples"),
    "two counts": ({"data": [DATA], "workers": 2}, ConfigError, "workers is 2, but the list has 1 entries"),
    "no end": ({"until": Stop()}, ConfigError, "until has no condition"),
    "end": ({"until": Stop(updates=0)}, ConfigError, "until"),
    "batch": ({"batch_size": 0}, ConfigError, "batch_size"),
    "section": ({"settings": {"codecs": {}}}, ConfigError, "codecs"),
    "said twice": ({"settings": {"hub": {"stop": {}}}}, ConfigError, "not contain hub.stop: use an argument"),
    "data said twice": (
        {"settings": {"evaluation": {"data": "held-out.npz"}}},
        ConfigError,
        "evaluation.data: use the argument evaluate",
    ),
    "accuracy": ({"until": Stop(accuracy=0.9)}, ConfigError, "accuracy"),
    "loss": ({"loss": "mse"}, ConfigError, "always uses the loss cross_entropy"),
    "metrics": ({"metrics": ["precision"]}, ConfigError, "precision"),
    "metric of values": ({"metrics": [MAE()]}, ConfigError, "mae does not apply to the loss cross_entropy"),
    "metrics of one's own": ({"model": Own(), "metrics": ["f1"]}, ConfigError, "the model Own reports no scores"),
    "parts": ({"micro_batch_size": "small"}, ConfigError, "micro_batch_size"),
    "accumulation": ({"accumulation_steps": 0}, ConfigError, "accumulation_steps"),
    "batch norm": (
        {"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "micro_batch_size": "auto"},
        ConfigError,
        "computes different statistics on parts",
    ),
    "smoothing": ({"loss": CrossEntropy(label_smoothing=3.0)}, ConfigError, "loss.label_smoothing"),
    "passes of trainers": (
        {"model": ARRAYS, "data": [trainer_of(SMALL, DATA)], "until": None},
        ConfigError,
        r"your own trainers do not report their size; use Stop\(updates=\.\.\.\)",
    ),
    "one trainer": (
        {"model": ARRAYS, "data": [trainer_of(SMALL, DATA), *[trainer_of(SMALL, DATA)] * 2]},
        ConfigError,
        "workers 2 and 3 share a trainer object: create one for each worker",
    ),
    "classes": ({"model": Scores(), "evaluate": DATA}, ConfigError, r"predict returned shape \(1, 2\) for 1"),
    "no evaluation": ({"evaluate": lambda _: "good"}, ConfigError, "evaluate returned str; return a loss"),
    "percent": ({"evaluate": lambda _: (0.1, 95.0)}, ConfigError, "accuracy 95; return a fraction from 0 to 1"),
    "until": ({"until": 100}, ConfigError, r"until is int; pass a Stop such as Stop\(updates=100\)"),
    "policy": ({"policy": "quorum"}, ConfigError, "policy is str; pass a Policy"),
    "settings": ({"settings": "hub.toml"}, ConfigError, "settings is str; pass a dict of tables"),
    "unknown loss": ({"loss": "nll"}, ConfigError, "loss"),
    "optimizer": ({"optimizer": SGD}, ConfigError, "optimizer is <class .*; pass an optimizer such as SGD"),
    "callbacks": ({"callbacks": print}, ConfigError, "callbacks is builtin_function_or_method; pass a list"),
    "callback": ({"callbacks": [3]}, ConfigError, "the callback int has none of these methods: on_join, "),
    "run": ({"run": 5}, ConfigError, "run is 5; pass the path of a folder"),
    "arrays alone": ({"model": ARRAYS}, ConfigError, "named arrays alone cannot be trained on data"),
    "trainer": (
        {"model": ARRAYS, "data": [trainer_of(SoftmaxModel(inputs=4, classes=3), DATA)]},
        ModelMismatchError,
        "the arrays of trainer 1 differ",
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
    with pytest.raises(EdgeAsyncError, match="needs an endless iterator"):
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


@pytest.fixture
def interruptible():
    """Hear interrupts, also where a shell has started the tests in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_the_newest_model(tmp_path, interruptible):
    def interrupt(progress):
        if progress.version == 10:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(SMALL, [DATA], run=tmp_path, until=Stop(when=interrupt, minutes=5), policy=ONE_BY_ONE)
    assert Run.open(tmp_path).version >= 10


def test_nothing_is_left_behind():
    train(SMALL, DATA, until=Stop(updates=2))
    before = threading.active_count()
    runs = [train(SMALL, DATA, until=Stop(updates=2)) for _ in range(5)]
    gc.collect()
    wait_for_threads(before)
    paths = [run.path for run in runs]
    assert all(path.exists() for path in paths)
    del runs
    gc.collect()
    assert not any(path.exists() for path in paths)
