"""The toolbox stays thin, and says who a process is."""

import ast
import logging
from pathlib import Path

import pytest

from edgeasync import async_train
from edgeasync.async_train import AsyncModelAverager, nn
from edgeasync.async_train.distributed import find_master
from edgeasync.async_train.ignored import ignore
from edgeasync.async_train.worker import Progress
from edgeasync.callbacks import ExchangeEvent
from edgeasync.errors import ConfigError

LINES_MAX = 60
FILES = sorted(Path(async_train.__file__).parent.rglob("*.py"))


def code_lines(found, text):
    """Return how many lines of a class are code: neither empty nor part of a docstring."""
    said = set()
    for node in ast.walk(found):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            said |= set(range(node.lineno, node.end_lineno + 1))
    lines = text.splitlines()
    return sum(
        bool(lines[number - 1].strip())
        for number in range(found.lineno, found.end_lineno + 1)
        if number not in said
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_class_is_short(path):
    text = path.read_text("utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    assert not {each.name: count for each in classes if (count := code_lines(each, text)) >= LINES_MAX}


def test_every_name_is_there():
    assert all(getattr(async_train, name) for name in dir(async_train))
    with pytest.raises(AttributeError, match="AsyncServer"):
        async_train.AsyncServer  # noqa: B018


def test_rank_and_world_size_come_from_the_environment_or_from_arguments(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
        monkeypatch.delenv(name)
    assert (async_train.init_distributed(), find_master()) == ((0, 1), "tcp://127.0.0.1:29500")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert async_train.distributed.init_distributed() == (2, 4)
    found = async_train.init_distributed(rank=1, world_size=2, master_addr="10.0.0.1", master_port=5001)
    assert (found, find_master()) == ((1, 2), "tcp://10.0.0.1:5001")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        async_train.init_distributed()


@pytest.mark.parametrize("given", [{}, {"world_size": 4}, {"rank": 2}, {"rank": 2, "world_size": 4}])
def test_an_averager_has_its_place_from_the_environment_or_from_arguments(monkeypatch, given):
    environment = {"RANK": "2", "WORLD_SIZE": "4"} if not given else {"RANK": "2"} if "rank" not in given else {}
    environment |= {} if "world_size" in given or not given else {"WORLD_SIZE": "4"}
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    averaging = AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), **given).communication
    assert averaging._session_arguments["name"].startswith("rank-2-")
    assert averaging._world_size == 4
    assert averaging._hub_arguments is None, "rank 0 has the hub"


def test_a_rank_beyond_the_world_size_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="rank is 3 of world_size 3"):
        AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), world_size=3)


def tell(log_frequency, *updates):
    """Show a worker's progress updates with these numbers of steps."""
    progress = Progress(log_frequency)
    for number, steps in enumerate(updates, 1):
        told = {"loss": 0.5, "examples": 32, "metrics": {"accuracy": 0.75}, "bytes_up": 1, "bytes_down": 1}
        progress.on_exchange(
            ExchangeEvent(
                time_s=0.0,
                device="pi",
                number=number,
                outcome="applied",
                version=number,
                local_steps=steps,
                **told,
            )
        )


def test_progress_is_visible_without_logging_and_is_logged_with_it(capsys, caplog):
    tell(4, 3, 3, 3)
    assert capsys.readouterr().err.splitlines() == [
        "batch 6, version 2: loss 0.5, accuracy 0.75", "batch 9, version 3: loss 0.5, accuracy 0.75",
    ]  # fmt: skip
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "edgeasync.async_train"):
        tell(4, 4)
    assert caplog.messages == ["batch 4, version 1: loss 0.5, accuracy 0.75"]
    assert not capsys.readouterr().err


def test_what_is_ignored_is_said_once(caplog):
    for _ in range(2):
        ignore("test_house", "nothing needs it", one=1, two=None)
    assert [record.getMessage() for record in caplog.records] == ["test_house: one is ignored: nothing needs it"]
