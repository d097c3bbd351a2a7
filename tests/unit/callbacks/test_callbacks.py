"""The ready callbacks: what each shows, writes and ends, given events one by one."""

import csv
import doctest
import io
import threading

import numpy as np
import onnx
import pytest
from rich.console import Console

from edgeasync import Agent, callbacks, nn
from edgeasync.callbacks import (
    CSVLog,
    Progress,
    SaveBest,
    StopTraining,
    StopWhen,
    csv_log,
    progress,
    save_best,
    stop_when,
)
from edgeasync.errors import ConfigError
from edgeasync.sdk import agent, hub
from edgeasync.sdk import callbacks as dispatch
from edgeasync.sdk.callbacks import Callbacks
from edgeasync.sdk.events import HANDLERS
from tests.support.processes import PATIENCE_S

END = callbacks.EndEvent(time_s=9.0, reason="done")


def update(number, loss=0.5, outcome="applied"):
    return callbacks.UpdateEvent(
        time_s=float(number), device="a", number=number, outcome=outcome, version=number, loss=loss, examples=32,
        local_steps=16, staleness=0,
    )  # fmt: skip


def evaluation(loss, accuracy=None):
    return callbacks.EvaluationEvent(time_s=1.0, version=7, loss=loss, accuracy=accuracy)


def exchange(loss):
    return callbacks.ExchangeEvent(
        time_s=1.0, device="a", number=1, outcome="applied", version=3, loss=loss, examples=32, local_steps=16,
        bytes_up=100, bytes_down=200,
    )  # fmt: skip


def best(arrays, restore=dict):
    return callbacks.BestEvent(time_s=1.0, version=7, loss=0.1, accuracy=None, arrays=arrays, restore=restore)


@pytest.mark.parametrize("module", [csv_log, progress, save_best, stop_when, dispatch, agent, hub])
def test_the_examples_run(module, capsys):
    found = doctest.testmod(module, extraglobs={"np": np})
    assert (found.failed, found.attempted > 0) == (0, True)


def test_every_event_has_a_public_name():
    named = {getattr(callbacks, name) for name in callbacks.__all__ if name.endswith("Event")}
    assert named == {callbacks.Event, *HANDLERS}


# -- StopWhen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "event", "reason"),
    [
        (StopWhen(lambda event: event.time_s > 8), END, "StopWhen said so"),
        (StopWhen(lambda event: event.time_s > 8, reason="enough"), END, "enough"),
        (StopWhen("loss", below=0.1), evaluation(0.05), "loss 0.05 is below 0.1"),
        (StopWhen("accuracy", above=0.9), evaluation(1.0, 0.95), "accuracy 0.95 is above 0.9"),
        (StopWhen("loss", below=0.1), exchange(0.05), "loss 0.05 is below 0.1"),
    ],
)
def test_a_rule_ends_the_run_with_its_reason(rule, event, reason):
    rule(update(1, loss=0.01))
    with pytest.raises(StopTraining, match=reason):
        rule(event)


@pytest.mark.parametrize("event", [evaluation(0.2), evaluation(float("nan")), exchange(0.2), exchange(None), END])
def test_a_rule_that_is_not_met_ends_nothing(event):
    StopWhen("loss", below=0.1)(event)


def test_a_rule_without_sense_says_what_to_give():
    for wrong in ({"rule": "loss"}, {"rule": "loss", "below": 1, "above": 2}):
        with pytest.raises(ConfigError, match=r"needs a bound: give below=0\.1"):
            StopWhen(**wrong)
    for wrong in ({"rule": 3}, {"rule": lambda _: True, "below": 1}):
        with pytest.raises(ConfigError, match="takes a function of an event alone"):
            StopWhen(**wrong)
    with pytest.raises(ConfigError, match="evaluations have no accuracy; for an accuracy give evaluate="):
        StopWhen("accuracy", above=0.5)(evaluation(1.0))


# -- CSVLog ------------------------------------------------------------------------------------------------


def test_a_log_has_a_line_for_each_event_and_is_continued(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    for _ in range(2):
        log = CSVLog(path)
        for event in (update(1), evaluation(0.25, 0.5), exchange(None), END):
            log(event)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["event"] for line in lines] == ["update", "evaluation", "exchange", "end"] * 2
    assert (lines[0]["device"], lines[0]["loss"], lines[0]["accuracy"]) == ("a", "0.5", "")
    assert (lines[1]["accuracy"], lines[2]["bytes_down"], lines[3]["reason"]) == ("0.5", "200", "done")


def test_a_file_of_something_else_is_left_as_it_is(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no file that CSVLog wrote"):
        CSVLog(path)(END)
    assert path.read_text() == "a,b\n1,2\n"


# -- SaveBest ----------------------------------------------------------------------------------------------


def test_the_best_model_is_written_in_its_kind(tmp_path):
    proto = nn.to_onnx(nn.Linear(3, 2), (3,), seed=0)
    arrays = {"file": np.ones(3, np.float32), "a.b": np.zeros((2, 2), np.float32)}
    saver = SaveBest(tmp_path / "best")
    saver.on_best(best({}, lambda _: proto))
    assert saver.saved == tmp_path / "best.onnx"
    assert onnx.load(saver.saved) == proto
    saver.on_best(best(arrays))
    assert saver.saved == tmp_path / "best.npz"
    with np.load(saver.saved) as found:
        assert {name: found[name].tolist() for name in found} == {n: a.tolist() for n, a in arrays.items()}
    arrays_alone = SaveBest(tmp_path / "new" / "arrays.npz")
    arrays_alone.on_best(best(arrays, lambda _: proto))
    assert np.load(arrays_alone.saved)["file"].tolist() == [1.0] * 3
    with pytest.raises(ConfigError, match=r"best.onnx: only models of ONNX.* best\.safetensors or best\.npz"):
        SaveBest(tmp_path / "best.onnx").on_best(best(arrays))


def test_an_agent_refuses_what_never_happens_there():
    with pytest.raises(ConfigError, match="the callback SaveBest has none of the methods that are called here"):
        Agent("tcp://127.0.0.1:5555", (np.eye(2), [0, 1]), callbacks=[SaveBest("best")])
    with pytest.raises(ConfigError, match=r"the callback SaveBest is a class; give an object: SaveBest\(\.\.\.\)"):
        Callbacks([SaveBest])


@pytest.mark.asyncio
async def test_of_best_models_that_wait_only_the_newest_is_told():
    told, both_wait = [], threading.Event()

    class Watch:
        def on_join(self, _):
            both_wait.wait(PATIENCE_S)

        def on_best(self, event):
            told.append(event.arrays["a"].tolist())

    async with Callbacks([Watch(), told.append]) as waiting:
        waiting.tell(callbacks.JoinEvent(time_s=0.0, device="a"))
        waiting.tell(best({"a": np.zeros(1)}))
        waiting.tell(best({"a": np.ones(1)}))
        both_wait.set()
    assert told[1:] == [[1.0]], "after the join; and a function is told of no models"


# -- Progress ----------------------------------------------------------------------------------------------


def shown(events, *, terminal, **options):
    text = io.StringIO()
    bar = Progress(console=Console(file=text, force_terminal=terminal, force_jupyter=False, width=120), **options)
    for event in events:
        bar(event)
    return text.getvalue()


JOINS = [callbacks.JoinEvent(time_s=0.0, device=name) for name in "ab"]
EVENTS = [*JOINS, *map(update, range(1, 6)), update(6, outcome="stale"), evaluation(0.1, 0.875), END]


def test_without_a_terminal_there_is_a_plain_line_now_and_then():
    assert shown(EVENTS, terminal=False) == "5 updates, version 0, loss 0.5, accuracy 87.5%, 2 devices\n"
    assert shown(EVENTS, terminal=False, every_s=0.0).count("\n") == len(EVENTS)


def test_in_a_terminal_the_line_changes():
    text = shown([*EVENTS, *EVENTS], terminal=True, updates=5)
    assert "5 updates, version 0, loss 0.5, accuracy 87.5%, 2 devices" in text
    assert "\x1b[" in text
    assert "━" in text
