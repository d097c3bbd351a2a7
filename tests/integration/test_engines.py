"""`train(engine="processes")`: workers are processes. They come back when they die, and leave nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgeasync import EdgeAsyncError, Run, StepResult, Stop, nn, train
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError
from edgeasync.sdk import events
from edgeasync.temporary import TemporaryFolder
from tests.support.parts.small_runs import MODEL, Still
from tests.support.programs.processes import PATIENCE_S, until, wait_for_threads

pytestmark = pytest.mark.process

ARRAYS = dict(MODEL.spec.views(MODEL.initial(0)))
X = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
WORKERS = {"worker-1", "worker-2"}
DATA = X, (X[:, 0] > X[:, 1]).astype(np.int64)
ROOT = Path(__file__).parents[2]


def workers_of(pid):
    """Return the worker processes of a program, by their names."""
    children = psutil.Process(pid).children(recursive=True)
    return {child.name(): child for child in children if child.name().startswith("worker-")}


class KillsOne:
    """Kills a worker after twenty updates, and ends training when it has come back and sent ten more."""

    def __init__(self):
        self.victim = None
        self._joins = self._updates = 0

    def on_join(self, event):
        self._joins += event.device == "worker-2"

    def on_update(self, event):
        self._updates += event.device == "worker-2" and self._joins == 2

    def until(self, progress):
        if self.victim is None and self._joins and progress.updates >= 20:
            self.victim = workers_of(os.getpid())["worker-2"]
            self.victim.kill()
        return self._updates >= 10


def test_a_worker_that_is_killed_comes_back(temporary, tmp_path, caplog):
    threads, kills = threading.active_count(), KillsOne()
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    run = train(
        network, DATA, workers=2, evaluate=DATA, run=tmp_path / "run", engine="processes", callbacks=[kills],
        until=Stop(when=kills.until),
    )  # fmt: skip
    assert run.accuracy > 0.8
    assert run.reason == "Stop(when=...) returned true"
    assert "worker-2 died, it was killed by signal 9, Killed; restarting it" in caplog.text
    comings = [type(event) for event in run.events if getattr(event, "device", "") == "worker-2"]
    assert comings == [events.Join, events.Leave, events.Join]
    assert not workers_of(os.getpid())
    wait_for_threads(threads)
    again = train(network, DATA, workers=2, run=tmp_path / "run", until=Stop(updates=run.updates + 5))
    assert again.version > run.version
    assert not [event for event in again.events if isinstance(event, events.Leave)], "the engine may change"


class NoSensorError(Exception):
    def __init__(self, sensor, port):
        super().__init__(f"sensor {sensor} at {port} is gone")


class Raises(Still):
    def __init__(self, kind, *arguments):
        self.kind, self.arguments = kind, arguments

    def step(self):
        raise self.kind(*self.arguments)


class Exits(Still):
    def step(self):
        os._exit(3)


class Hangs(Still):
    """One whose step never ends by itself."""

    def step(self):
        threading.Event().wait()


@pytest.mark.parametrize("engine", ["tasks", "processes"])
def test_the_hub_knows_how_many_examples_workers_have(engine, temporary, tmp_path):
    parts = [(X[:300], DATA[1][:300]), (X[300:], DATA[1][300:])]
    seen = []
    until = Stop(when=lambda _: {event.device for event in seen if isinstance(event, events.Join)} == WORKERS)
    train(MODEL, parts, run=tmp_path / "run", engine=engine, until=until, callbacks=[seen.append])
    replay = RunReplay(tmp_path / "run")
    replay.tell(lambda _: True)
    told = {name: member.profile.examples for name, member in replay.core.members.members.items()}
    replay.close()
    assert told == {"worker-1": 300, "worker-2": 100}


@pytest.mark.parametrize(
    ("trainer", "kind", "words"),
    [
        (Raises(ValueError, "the sensor is gone"), ValueError, "the sensor is gone"),
        (Raises(NoSensorError, 3, 5), EdgeAsyncError, "NoSensorError: sensor 3 at 5 is gone"),  # not to be pickled
        (Raises(SystemExit, 3), EdgeAsyncError, "raised SystemExit in"),
    ],
    ids=["error", "odd error", "exit"],
)
def test_what_a_worker_raises_comes_out_with_its_name(temporary, trainer, kind, words):
    with pytest.raises(kind, match=words) as caught:
        train(ARRAYS, [Still(), trainer], until=Stop(updates=10**9), engine="processes")
    (note,) = caught.value.__notes__
    assert note.startswith("raised in worker-2:\nTraceback")
    assert "in step" in note
    assert not workers_of(os.getpid())


class TellsThreads(Still):
    def step(self):
        raise ValueError(f"{os.environ['OMP_NUM_THREADS']} and {os.environ['OPENBLAS_NUM_THREADS']}")


def test_the_cores_are_divided_unless_the_user_has_said(temporary, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    with pytest.raises(ValueError, match=rf"^{share} and 7\b"):
        train(ARRAYS, [TellsThreads(), TellsThreads()], until=Stop(updates=1), engine="processes")


class Draws(Still):
    """Tells a number that numpy's global generator draws first."""

    def step(self):
        return StepResult(np.random.random(), 1)  # noqa: NPY002 - as a user's transforms may


def test_workers_draw_numbers_of_their_own(temporary):
    seen = {}

    def note(event):
        if isinstance(event, events.Update):
            seen.setdefault(event.device, event.loss)

    train(
        ARRAYS, [Draws(), Draws()], until=Stop(when=lambda _: len(seen) == 2), engine="processes", callbacks=[note]
    )
    assert len(set(seen.values())) == 2


def test_workers_come_back_when_what_forks_them_dies(temporary, tmp_path, caplog):
    killed, seen = [], []

    def until(progress):
        joins = sum(isinstance(event, events.Join) for event in seen)
        if not killed and joins == 2:
            forker = next(iter(workers_of(os.getpid()).values())).parent()
            killed.append(forker)
            forker.kill()
        return progress.updates >= 200 and joins >= 4

    run = train(
        MODEL,
        DATA,
        workers=2,
        run=tmp_path / "run",
        engine="processes",
        until=Stop(when=until),
        callbacks=[seen.append],
    )
    assert run.updates >= 200
    assert "worker-1 died, it was killed by signal 9, Killed; restarting it" in caplog.text
    assert not workers_of(os.getpid())


def test_a_worker_that_dies_every_time_is_a_clear_error(temporary):
    with pytest.raises(
        EdgeAsyncError, match=r"worker-1 died 4 times within \d+ s, last: it ended with exit code 3"
    ):
        train(ARRAYS, [Exits()], until=Stop(updates=1), engine="processes")


def test_what_cannot_be_handed_to_a_process_is_told(temporary):
    trainer = Still()
    trainer.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"the trainer of worker-1 cannot be pickled for a process: .*lock.* `begin`"
    ):
        train(ARRAYS, [trainer], until=Stop(updates=1), engine="processes")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "threads"}, "engine is 'threads'; choose one of 'tasks', 'processes', 'ray'"),
        ({"ray_address": "auto"}, "ray_address requires engine='ray', but engine is 'tasks'"),
        ({"engine": "processes"}, "the package cloudpickle; run pip install 'edgeasync\\[processes\\]'"),
        ({"engine": "ray"}, "engine='ray' needs Ray; run pip install 'edgeasync\\[ray\\]'"),
    ],
    ids=["engine", "address", "no cloudpickle", "no Ray"],
)
def test_a_mistake_is_one_line_that_says_what_to_do(given, words, temporary, monkeypatch):
    for package in ("cloudpickle", "ray"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=words) as caught:
        train(MODEL, DATA, until=Stop(updates=1), **given)
    assert "\n" not in str(caught.value)


SCRIPT = """
import sys
import numpy as np
from edgeasync import Stop, train

class Mine:
    parameters = {"weight": np.zeros((4, 2))}

    def gradient(self, arrays, x, y):
        return 0.5, {"weight": np.full((4, 2), 1e-3)}

x = np.eye(4)
def tell(progress):
    if progress.version == 3:
        print("going", flush=True)

train(Mine(), (x, [0, 1, 0, 1]), workers=2, until=Stop(when=tell), run=sys.argv[1], engine="processes")
"""


@pytest.fixture
def script(tmp_path, temporary):
    """Start a script without a main guard, whose model is a class of its own; wait until it trains."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "script.py", "run"], cwd=tmp_path, env=environment, text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "going\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def test_an_interrupt_ends_all_and_leaves_the_newest_version(script, tmp_path):
    workers = workers_of(script.pid).values()
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    assert script.wait(PATIENCE_S) == -signal.SIGINT
    assert script.stderr.read().splitlines()[-1] == "KeyboardInterrupt"
    assert len(workers) == 2
    assert not [worker for worker in workers if worker.is_running()]
    assert Run.open(tmp_path / "run").version >= 3


def test_workers_end_when_the_parent_is_killed(script, temporary):
    workers = [*workers_of(script.pid).values()]
    assert {path.stat().st_mode & 0o077 for path in temporary.iterdir()} == {0}, "for this user alone"
    script.kill()
    _, left = psutil.wait_procs(workers, PATIENCE_S)
    assert (len(workers), left) == (2, [])
    until(lambda: not [*temporary.iterdir()], "the folder's end")


LEAVES = """
import sys
import numpy as np
from edgeasync import Stop, nn, train
data = np.zeros((40, 4), np.float32), np.zeros(40, np.int64)
train(nn.Linear(4, 2), data, workers=2, engine=sys.argv[1], topology=sys.argv[2], until=Stop(minutes=10))
"""


@pytest.mark.parametrize(
    ("engine", "topology"), [("tasks", "star"), ("processes", "star"), ("tasks", "ring"), ("processes", "ring")]
)
def test_what_a_killed_program_leaves_is_removed_by_the_next(engine, topology, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", LEAVES, engine, topology]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            until(lambda: [*tmp_path.rglob("lock")], "training")  # of the run, or of the state of a worker
            family = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    assert [*tmp_path.glob("edgeasync-*")]
    TemporaryFolder().remove()
    assert not [*tmp_path.glob("edgeasync-*")]


def test_a_step_that_never_ends_holds_up_no_end(temporary):
    def until_both(progress):
        return progress.updates >= 5

    run = train(ARRAYS, [Still(), Hangs()], until=Stop(when=until_both), engine="processes")
    assert run.updates >= 5
    assert not workers_of(os.getpid())
