"""Libraries that replace Python's threads are refused before anything waits for one."""

import queue
import threading

import numpy as np
import pytest

from edgeasync import Agent, Hub, join, train, train_async
from edgeasync.async_train import ParameterServer, nn
from edgeasync.errors import ConfigError
from edgeasync.host.event_loop import check_threads
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.command_line import CONFIG, mistake
from tests.support.programs.processes import Commands

MODEL = SoftmaxModel(inputs=4, classes=2)
DATA = np.eye(4), np.array([0, 1, 0, 1])
NOWHERE = "tcp://127.0.0.1:9"


def replacement():
    """Stands in for what a library puts in place of Python's own."""


@pytest.fixture(
    params=[(threading, "get_ident"), (threading, "Lock"), (queue, "SimpleQueue")], ids=lambda place: place[1]
)
def replace(request, monkeypatch):
    monkeypatch.setattr(replacement, "__module__", "gevent.thread")
    return lambda: monkeypatch.setattr(*request.param, replacement)


def begin_server(_):
    ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0).start()


BEGINNINGS = {
    "Hub": lambda folder: Hub(MODEL, run=folder / "run").start(),
    "Agent": lambda _: Agent(NOWHERE, DATA).start(),
    "join": lambda _: join(NOWHERE, {"w": np.zeros(3, np.float32)}),
    "train": lambda folder: train(MODEL, DATA, run=folder / "run"),
    "train_async": lambda folder: train_async(MODEL, DATA, run=folder / "run").send(None),
    "ParameterServer": begin_server,
}


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_nothing_begins_without_pythons_own_threads(tmp_path, monkeypatch, replace, begin):
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    replace()
    with pytest.raises(ConfigError, match="gevent has replaced Python's threads or queues"):
        BEGINNINGS[begin](tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["hub", "agent"])
def test_the_commands_say_so(tmp_path, replace, command):
    with Commands(tmp_path) as commands:
        arguments = {
            "hub": ["hub", commands.settings()],
            "agent": ["agent", "--hub", NOWHERE, "--data", commands.data("data.npz")],
        }
        replace()
        mistake(commands, CONFIG, "gevent has replaced", arguments=arguments[command])


def test_pythons_own_threads_are_fine():
    check_threads()
