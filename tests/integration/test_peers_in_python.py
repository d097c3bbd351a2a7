"""Training without a hub, from Python and by the command: it learns, ends as told, and writes its model."""

import asyncio
import errno
import os
import threading
import time
from statistics import mean

import numpy as np
import pytest
import safetensors.numpy

from edgeasync import SGD, Peer, Run, StepResult, Stop, train, train_async
from edgeasync.async_train import async_sgd, nn
from edgeasync.async_train.model import Model
from edgeasync.data import load_digits
from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import iid
from edgeasync.durable.files import FolderLock
from edgeasync.durable.keys import HubKeys
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.errors import ConfigError, ModelMismatchError, StorageError
from edgeasync.graphs.model_file import load_model
from edgeasync.nn import Linear, Sequential, to_onnx
from edgeasync.runtime import model_keeper
from edgeasync.runtime.peer import PEER_MODEL_FILE, PeerRuntime
from edgeasync.sdk import peers
from edgeasync.sdk.peers import PeerWorkers
from edgeasync.sdk.workers.base import make_trainer
from edgeasync.training.evaluation import NumpyEvaluator
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from tests.support.parts import small_runs
from tests.support.programs.command_line import CONFIG, mistake
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import PATIENCE_S, free_address, until
from tests.support.security.keyed import start_hub
from tests.support.size import repetitions

pytestmark = pytest.mark.process

MODEL = MlpModel(inputs=64, hidden=(32,), classes=10)
FAST = {"peer": {"round_steps": 5}}


@pytest.fixture(scope="module")
def draws():
    """Return shares of workers and digits held out, drawn several times: each draw favours one way."""
    digits = load_digits()
    x, y = digits.x, digits.y
    drawn = []
    for seed in range(repetitions("draws of digits")):
        order = np.random.default_rng(seed).permutation(len(y))
        training, held_out = Dataset.of(x[order[360:]], y[order[360:]]), (x[order[:360]], y[order[:360]])
        drawn.append((list(iid(training, repetitions("peers that average"), seed)), held_out))
    return drawn


class Moves:
    """A trainer of a user's own, of four values."""

    spec = SoftmaxModel(inputs=1, classes=2).spec

    def begin(self, parameters):
        self.parameters = parameters


HOW = {"until": Stop(epochs=200), "optimizer": SGD(learning_rate=0.3)}


@pytest.fixture(scope="module")
def star_accuracy(draws):
    return mean(train(MODEL, parts, evaluate=held_out, **HOW).accuracy for parts, held_out in draws)


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_processes_reach_the_accuracy_of_the_star(draws, star_accuracy, topology):
    how = {**HOW, "engine": "processes", "topology": topology, "settings": FAST}
    runs = [train(MODEL, parts, evaluate=held_out, **how) for parts, held_out in draws]
    assert mean(run.accuracy for run in runs) >= star_accuracy - 0.01
    assert {run.reason for run in runs} == {"all workers have reached until"}


def test_trainers_of_ones_own_end_after_their_rounds(tmp_path):
    """Their models are pulled apart, and averaged."""

    class Pull(Moves):
        def __init__(self, to):
            self.to = to

        def step(self):
            self.parameters += 0.1 * (self.to - self.parameters)
            return StepResult(loss=None, examples=1)

    first = Pull.spec.views(np.zeros(4, np.float32))
    trainers = [Pull(np.float32(to)) for to in (-1.0, 1.0, 3.0)]
    run = train(first, trainers, topology="ring", until=Stop(updates=90), settings=FAST, run=tmp_path / "run")
    assert np.allclose(next(iter(run.arrays.values())), 1.0, atol=0.5)
    kept = safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")
    assert kept.keys() == run.arrays.keys()


class Diverging(Moves):
    """A trainer that adds one in each step, or diverges in its first."""

    def __init__(self, amount):
        self.amount = np.float32(amount)

    def step(self):
        self.parameters += self.amount
        return StepResult(loss=None, examples=1)


@pytest.mark.parametrize("engine", ["tasks", "processes"])
@pytest.mark.parametrize("amounts", [(np.nan, 0.0), (np.nan, np.inf), (np.nan, 0.0, 0.0)])
def test_workers_that_diverge_do_not_wait_for_rounds(tmp_path, amounts, engine):
    first, trainers = Diverging.spec.views(np.ones(4, np.float32)), [Diverging(amount) for amount in amounts]
    how = {"topology": "ring", "engine": engine, "settings": FAST}
    run = train(first, trainers, until=Stop(updates=30), run=tmp_path, **how)
    assert all((array == 1.0).all() for array in run.arrays.values())
    assert run.reason.startswith("diverged" if np.inf in amounts else "all workers have reached until")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topology": "circle"}, "topology is 'circle'"),
        ({"callbacks": [print]}, "callbacks"),
        ({"until": Stop(accuracy=0.9)}, "without a hub, only epochs, minutes and updates work"),
        ({"settings": {"codec": {}}}, "without a hub, only the table peer applies"),
        ({"settings": {"peer": {"codec": "top_k(0.1)"}}}, "codec"),
        ({"settings": {"peer": {"peers": "x"}}}, "peer.peers"),
        ({"workers": 1}, "workers must be from 2 to 64"),
        ({"engine": "ray"}, "'tasks' or 'processes'"),
    ],
)
def test_mistakes_of_train(arguments, said):
    data = np.eye(4), [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=said):
        train(SoftmaxModel(inputs=4, classes=2), data, **{"topology": "ring", "workers": 2, **arguments})


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a_trainer_of_another_model_is_refused(topology):
    with pytest.raises(ModelMismatchError, match="the arrays of trainer 1 differ from the model"):
        train({"w": [1.0]}, [Adds(), Adds()], topology=topology, until=Stop(updates=10))


# -- the end by time ---------------------------------------------------------------------------------------------

SMALL = small_runs.MODEL
DATA = small_runs.DATA
ZEROS = dict(SMALL.spec.views(np.zeros(SMALL.spec.length, np.float32)))


def in_time(coroutine):
    """Run it; what hangs fails."""

    async def limited():
        async with asyncio.timeout(PATIENCE_S):
            return await coroutine

    return asyncio.run(limited())


@pytest.fixture
def opened(temporary, monkeypatch):
    """Return the workers of calls, once they are prepared, with their loops."""
    found, enter = [], PeerWorkers.__aenter__

    async def noted(workers):
        found.append((workers, asyncio.get_running_loop()))
        return await enter(workers)

    monkeypatch.setattr(PeerWorkers, "__aenter__", noted)
    monkeypatch.setattr(model_keeper, "COPY_S", model_keeper.COPY_S)  # which trainers here set
    return found


@pytest.mark.parametrize("engine", ["tasks", "processes"])
def test_a_time_that_is_over_before_a_worker_trains_ends_all(temporary, engine):
    """The workers have no model to leave: the run's is that of the beginning."""
    run = in_time(
        train_async(SMALL, DATA, workers=2, topology="ring", engine=engine, until=Stop(minutes=1e-9), seed=3)
    )
    assert run.reason == "until.minutes is reached"
    assert run.version == 0
    assert (SMALL.spec.flatten(run.arrays) == SMALL.initial(3)).all()


def test_a_worker_whose_trainer_is_made_late_ends_all_the_same(opened, monkeypatch):
    """The time is over while the trainers are made: no peer runs that could be asked to end."""

    def make_late(*arguments):
        (workers, loop), stopped = opened[0], threading.Event()
        loop.call_soon_threadsafe(lambda: (workers.stop(), stopped.set()))
        assert stopped.wait(PATIENCE_S)
        return make_trainer(*arguments)

    monkeypatch.setattr(peers, "make_trainer", make_late)
    run = in_time(train_async(SMALL, DATA, workers=2, topology="ring", until=Stop(minutes=60)))
    assert run.reason == "until.minutes is reached"


class Slow:
    """Adds one to all values; then it takes a step that does not end while training does."""

    spec = SMALL.spec

    def __init__(self, begun):
        self.begun = begun  # a file, which tells that this step has begun
        self.steps = 0

    def begin(self, parameters):
        model_keeper.COPY_S = 0.0  # as if its first step had taken long
        self.parameters = parameters

    def step(self):
        self.steps += 1
        if self.steps == 2:
            self.begun.touch()
            threading.Event().wait(PATIENCE_S)
        self.parameters += 1.0
        return StepResult(loss=None, examples=1)


class SlowToServe(Slow):
    """As its process ends, others seem to need its round: it stays for a lease."""

    def begin(self, parameters):
        super().begin(parameters)
        PeerRuntime._serves = True


@pytest.mark.parametrize(
    ("engine", "kind", "lease_s"),
    [("tasks", Slow, 10.0), ("processes", Slow, 10.0), ("processes", SlowToServe, 3.5)],
)
def test_a_slow_step_costs_no_step_before_it(opened, tmp_path, engine, kind, lease_s):
    files = [tmp_path / name for name in "ab"]

    def stop():
        until(lambda: all(file.exists() for file in files), "the slow steps")
        workers, loop = opened[0]
        loop.call_soon_threadsafe(workers.stop)

    stopping = threading.Thread(target=stop)
    stopping.start()
    how = {"settings": {"peer": {"lease_s": lease_s}}, "until": Stop(minutes=60), "engine": engine}
    run = in_time(train_async(ZEROS, [kind(file) for file in files], topology="ring", **how))
    stopping.join()
    assert (run.version, run.reason) == (1, "until.minutes is reached")
    assert all((array == 1.0).all() for array in run.arrays.values())


def test_a_folder_for_workers_that_cannot_be_written_is_told_and_removed(temporary, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(StorageError, match="No space left on device; free space, or set TMPDIR to another folder"):
        train(SMALL, DATA, workers=2, topology="ring", until=Stop(updates=1))


# -- the folder of the run ---------------------------------------------------------------------------------------


class Adds:
    """Adds one to all values in each step, and notes what it began with; `fails` in its third step."""

    spec = SMALL.spec

    def __init__(self, *, fails=False):
        self.fails, self.steps, self.first = fails, 0, None

    def begin(self, parameters):
        self.parameters = parameters
        self.first = parameters.copy() if self.first is None else self.first

    def step(self):
        self.steps += 1
        if self.fails and self.steps == 3:
            raise ZeroDivisionError("on purpose")
        self.parameters += 1.0
        return StepResult(loss=None, examples=1)


def add(run, updates=20, **arguments):
    """Train two workers that add; each takes part in half the updates."""
    trainers = [Adds(), Adds()]
    how = {"topology": "ring", "until": Stop(updates=updates), "settings": FAST, "run": run}
    return train(ZEROS, trainers, **how | arguments), trainers


def test_a_second_call_on_the_folder_continues(tmp_path):
    first, _ = add(tmp_path / "run")
    second, trainers = add(tmp_path / "run")
    before = SMALL.spec.flatten(first.arrays)
    assert all((trainer.first == before).all() for trainer in trainers)
    assert second.version == first.version + max(trainer.steps for trainer in trainers)
    opened = Run.open(tmp_path / "run")
    assert opened.version == second.version
    assert (SMALL.spec.flatten(opened.arrays) > before + 1.0).all()


def test_a_folder_of_a_hubs_run_is_refused_and_left_as_it_is(tmp_path):
    kept = train(SMALL, DATA, workers=2, run=tmp_path / "run", until=Stop(updates=5))
    content = (tmp_path / "run" / MODEL_FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"contains a run with a hub, .*; choose another folder"):
        train(SMALL, DATA, workers=2, run=tmp_path / "run", until=Stop(updates=5), topology="ring")
    assert (tmp_path / "run" / MODEL_FILE).read_bytes() == content
    assert Run.open(tmp_path / "run").version == kept.version


def test_a_hub_continues_what_peers_have_trained(tmp_path):
    first = train(SMALL, DATA, workers=2, run=tmp_path / "run", until=Stop(updates=20), topology="ring")
    second = train(SMALL, DATA, workers=2, run=tmp_path / "run", until=Stop(updates=5))
    assert second.version > first.version > 0


def test_a_folder_that_cannot_be_used_is_told_before_anything_is_trained(tmp_path):
    (tmp_path / "file").touch()
    trainers = [Adds(), Adds()]
    with pytest.raises(StorageError, match=r"file/run: cannot be used: .*; choose another folder for run"):
        train(ZEROS, trainers, topology="ring", until=Stop(updates=20), run=tmp_path / "file" / "run")
    assert [trainer.steps for trainer in trainers] == [0, 0]


def test_two_trainings_do_not_share_a_folder(tmp_path):
    lock = FolderLock(tmp_path / "run", "run")
    lock.take("")
    with pytest.raises(StorageError, match="another training has this folder"):
        add(tmp_path / "run")
    lock.close()
    add(tmp_path / "run")


def test_a_disk_that_is_full_at_the_end_costs_no_model(tmp_path, monkeypatch, caplog):
    def full(path, *_, **__):
        raise StorageError(f"{path}: cannot be written: No space left on device; free space or fix its rights")

    monkeypatch.setattr(peers, "save_model", full)
    run, _ = add(tmp_path / "run")
    assert (SMALL.spec.flatten(run.arrays) > 0.0).all()
    assert "free space or fix its rights; the trained model is in run.arrays only" in caplog.text


def test_what_was_trained_before_a_worker_failed_is_in_the_folder(tmp_path):
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        train(
            ZEROS, [Adds(), Adds(fails=True)], topology="ring", until=Stop(updates=20), run=tmp_path / "run"
        )  # fmt: skip
    assert Run.open(tmp_path / "run").version >= 2


@pytest.mark.asyncio
async def test_a_training_that_is_cancelled_leaves_its_model_in_the_folder(tmp_path):
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    class Tells(Adds):
        def step(self):
            if self.steps == 2:
                loop.call_soon_threadsafe(begun.set)
            return super().step()

    how = {"topology": "ring", "until": Stop(minutes=60), "run": tmp_path / "run"}
    training = asyncio.create_task(train_async(ZEROS, [Tells(), Tells()], **how))
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    assert Run.open(tmp_path / "run").version >= 2


def test_the_toolbox_has_the_argument():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    model = Model(nn.Sequential(nn.Linear(4, 2)))
    trained = async_sgd(
        model, (x, x[:, 0] > 0), num_workers=2, num_epochs=50, lr=0.5, engine="tasks", topology="all_to_all"
    )
    assert trained is model
    assert (np.argmax(model(x), axis=1) == (x[:, 0] > 0)).mean() > 0.9


def test_peers_in_a_program_average_by_a_file_of_peers(tmp_path, draws):
    parts, held_out = draws[0]
    write_list(tmp_path, [0, 1])

    def peer(number):
        return Peer(
            parts[number],
            MODEL,
            peers=tmp_path / FILE,
            name=name_of(number),
            state=tmp_path / name_of(number),
            optimizer=SGD(learning_rate=0.3),
            round_steps=10,
            lease_s=5.0,
            epochs=20,
        )

    with peer(0) as one, peer(1) as other:
        until(lambda: one.rounds and other.rounds, "a round of both")
        reasons = [each.wait() for each in (one, other)]
        accuracies = [each.evaluate(held_out).accuracy for each in (one, other)]
        rounds = one.rounds
        arrays = one.arrays
    assert reasons == ["stopped", "stopped"]
    assert min(accuracies) > 0.85
    assert rounds > 3
    kept = safetensors.numpy.load_file(tmp_path / name_of(0) / PEER_MODEL_FILE)
    assert all((kept[name] == array).all() for name, array in arrays.items())


# -- the command --------------------------------------------------------------------------------------------------


SETTINGS = """
[peer]
peers = "peers.toml"
lease_s = 3.0
round_every_s = 0.2
[model]
kind = "softmax"
inputs = 8
classes = 3
"""


@pytest.fixture
def settings(tmp_path):
    """Write the list of two peers, and their settings; return the name of that file."""
    write_list(tmp_path, [0, 1])
    (tmp_path / "peer.toml").write_text(SETTINGS)
    return "peer.toml"


def device_flags(number, data):
    return ("--data", data, "--device-id", name_of(number), "--state", name_of(number))


def test_two_commands_average_and_write_their_models(commands, tmp_path, settings):
    peers = [
        commands.start(
            "peer", settings, *device_flags(number, commands.data(f"{number}.npz")), "--json",
            "--steps-max", 1500, "--step-s-min", 0.001, "--out", f"{number}.safetensors",
        )
        for number in (0, 1)
    ]  # fmt: skip
    for number, peer in enumerate(peers):
        peer.wait_for("peer_found", detail=name_of(1 - number))
        stopped = peer.wait_for("stopped")
        assert peer.wait() == 0
        assert stopped["steps"] == 1500
        assert stopped["rounds"] > 1
        assert stopped["loss"] < 1.0
        assert (tmp_path / f"{number}.safetensors").exists()
    again = commands.run("peer", settings, *device_flags(0, "0.npz"), "--steps-max", 1500)
    assert "1500 local steps before" in again.stdout


def test_an_onnx_model_goes_in_and_a_trained_one_comes_out(commands, tmp_path, settings):
    """A second start resumes its own model, and takes the steps that are left; the other peer never comes."""
    onnx_file = tmp_path / "model.onnx"
    onnx_file.write_bytes(to_onnx(Sequential(Linear(8, 3)), (8,)).SerializeToString())
    flags = (
        settings, "--topology", "all_to_all", "--model", onnx_file, "--out", "trained.onnx", "--json",
        *device_flags(0, commands.data("data.npz")),
    )  # fmt: skip
    for steps in (20, 30):
        peer = commands.start("peer", *flags, "--steps-max", steps)
        stopped = peer.wait_for("stopped")
        assert peer.wait() == 0
        assert stopped["steps"] == steps
    assert (tmp_path / "trained.onnx").read_bytes() != onnx_file.read_bytes()
    assert "20 local steps before" in peer.wait_for("started")["detail"]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (
            ("--peers", "none.toml"),
            "none.toml: no such file; create it with the same content on every device: peer = [",
        ),
        (("--out", "no/such/folder.safetensors"), "no/such"),
        (("--out", "model.onnx"), "has no ONNX forward model to export; choose model.safetensors"),
        (("--epochs", 2, "--steps-max", 3), "--steps-max and --epochs both limit the training; set only one"),
        (("--loss", "mse"), "--loss, --train and similar flags need an ONNX model; add --model FILE.onnx"),
    ],
)
def test_mistakes_of_the_command(commands, settings, flags, hint):
    data = commands.data("data.npz")
    mistake(commands, CONFIG, hint, arguments=("peer", settings, *device_flags(0, data), *flags))


@pytest.mark.parametrize(
    ("out", "hint"),
    [
        ("notes.txt", "notes.txt: unknown file type; choose a name that ends in .onnx or .safetensors"),
        ("folder.onnx", "folder.onnx: is a folder"),
        ("model.onnx", "model.onnx: is also an input file and would be overwritten"),
        (f"{name_of(0)}/{PEER_MODEL_FILE}", "is also an input file"),
    ],
)
def test_a_trained_model_takes_the_place_of_nothing_that_is_read(commands, tmp_path, settings, out, hint):
    onnx_file = tmp_path / "model.onnx"
    onnx_file.write_bytes(to_onnx(Sequential(Linear(8, 3)), (8,)).SerializeToString())
    (tmp_path / "folder.onnx").mkdir()
    flags = device_flags(0, commands.data("data.npz"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    arguments = ("peer", settings, *flags, "--model", "model.onnx", "--steps-max", 2, "--out", out)
    mistake(commands, CONFIG, hint, arguments=arguments)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


# -- found through a hub ------------------------------------------------------------------------------------------


def test_peers_that_were_found_through_a_hub_learn_without_it(commands, tmp_path, draws, star_accuracy):
    """The hub is killed as soon as all know one another. One of them starts again after that."""
    parts, held_out = draws[0]
    keys = HubKeys.init(tmp_path / "keys")
    hub, address = start_hub(commands, keys)
    (tmp_path / "peer.toml").write_text(
        '[peer]\nround_steps = 5\nlease_s = 3.0\nepochs = 200\n[model]\nkind = "mlp"\ninputs = 64\nhidden = [32]\n'
        'classes = 10\n[local]\noptimizer = [{kind = "sgd", learning_rate = 0.3}]\n'
    )
    flags = {}
    for number, part in enumerate(parts):
        np.savez(tmp_path / f"{number}.npz", x=part.x, y=part.y)
        step_s = 2.0 * len(parts) / (200 * len(part) / 32)  # training takes longer than to find the others
        flags[number] = (
            "peer", "peer.toml", "--hub", address, "--address", free_address(), "--data", f"{number}.npz",
            "--state", name_of(number), "--step-s-min", step_s, "--out", f"{number}.safetensors", "--json",
        )  # fmt: skip
    tokens = [keys.issue_token(name_of(number), (address,), time.time()).text() for number in flags]
    peers = [commands.start(*flags[number], "--enrol", tokens[number]) for number in flags]
    for peer in peers:
        for number in flags:
            if peer is not peers[number]:
                peer.wait_for("peer_found", detail=name_of(number))
    hub.kill()
    peers[0].kill()
    peers[0] = commands.start(*flags[0])
    stopped = [peer.wait_for("stopped") for peer in peers]
    assert [peer.wait() for peer in peers] == [0] * len(peers)
    assert min(each["rounds"] for each in stopped) > 10
    assert "peer_found" in peers[0].names()
    evaluate = NumpyEvaluator(MODEL, Dataset.of(*held_out))
    models = [load_model(tmp_path / f"{number}.safetensors", MODEL.spec)[0] for number in flags]
    assert mean(evaluate(model).accuracy for model in models) >= star_accuracy - 0.01
