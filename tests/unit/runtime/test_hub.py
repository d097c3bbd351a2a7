"""The hub's shell: stop, cancellation, errors in user code, saving, and evaluators."""

import asyncio
import errno
import random
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeasync import EdgeAsyncError, Parameter, ParameterSpec
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.settings import EvaluationSettings, StopCondition
from edgeasync.errors import ConfigError, DataError
from edgeasync.graphs.model_file import load_model
from edgeasync.runtime import hub as hub_module
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_files import HubFiles
from edgeasync.runtime.hub_opening import HubOpening
from edgeasync.training.evaluation import EvaluationResult
from tests.support.parts.hubs import (
    ONE_BY_ONE,
    SPEC,
    Adder,
    fail,
    make_agent,
    make_hub,
    odd_errors,
    run_settings,
    serve,
    workers,
    zeros,
)
from tests.support.programs.processes import PATIENCE_S

OFTEN = EvaluationSettings(every="1 update")


def open_files(folder):
    """Return the files below a folder that this process has open."""
    places = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [place for place in places if place.startswith(str(folder))]


# -- whatever the code of others raises ------------------------------------------------------------------------


@pytest.mark.asyncio
@odd_errors
async def test_an_evaluator_may_raise_anything(tmp_path, network, error):
    hub = make_hub(tmp_path, network, evaluation=OFTEN, evaluator=lambda _: fail(error))
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*hubs.py.*in fail") as caught:
        await serve(hub, make_agent(network))
    assert caught.value.__cause__ is error


@pytest.mark.asyncio
@odd_errors
async def test_what_makes_the_first_model_may_raise_anything(tmp_path, network, error):
    hub = make_hub(tmp_path, network, model=HostedModel(spec=SPEC, initial=lambda: fail(error)))
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*hubs.py.*in fail"):
        await serve(hub)
    assert open_files(tmp_path) == []


@pytest.mark.asyncio
async def test_what_is_told_to_may_raise_stop_iteration(tmp_path, network):
    def on_report(report):
        if report.event == "joined":
            next(iter(()))

    with pytest.raises(EdgeAsyncError, match=r"raised StopIteration.*test_hub.py.*in on_report"):
        await serve(make_hub(tmp_path, network, on_report=on_report), make_agent(network))


@pytest.mark.asyncio
async def test_a_hub_whose_reports_raise_saves_and_ends_all_the_same(tmp_path, network):
    """As they do if they are written to a full disk."""
    listening = asyncio.Event()

    def on_report(report):
        if report.event == "stopping":
            raise OSError(errno.ENOSPC, "No space left on device")
        listening.set()

    hub = make_hub(tmp_path, network, on_report=on_report)
    running = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await listening.wait()
        hub.model_file.unlink()
        hub.request_stop()
        with pytest.raises(OSError, match="No space left"):
            await running
    assert hub.model_file.exists(), "what was to be done after the report was done"


@pytest.mark.asyncio
async def test_a_hub_runs_once(tmp_path, network):
    listening, told = asyncio.Event(), []

    def on_report(report):
        told.append(report.event)
        if report.event == "listening":
            listening.set()

    hub = make_hub(tmp_path, network, on_report=on_report)
    running = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EdgeAsyncError, match="another Hub"):
            await asyncio.gather(asyncio.sleep(0), hub.run())
        await listening.wait()
        hub.request_stop()
        assert await running == "stopping"
        with pytest.raises(EdgeAsyncError, match="another Hub"):
            await hub.run()
        hub.request_stop()
    assert told == ["listening", "stopping"]


@pytest.mark.asyncio
async def test_a_hub_that_is_stopped_before_it_runs_touches_nothing(tmp_path, network):
    told = []
    hub = make_hub(tmp_path / "run", network, on_report=told.append)
    hub.request_stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await hub.run() == "stopping"
    assert not hub.recovered
    with pytest.raises(EdgeAsyncError, match="has no core until it has read"):
        hub.core  # noqa: B018
    assert (told, list(tmp_path.iterdir()), workers()) == ([], [], [])


# -- cancelled -------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_cancelled_hub_saves_what_it_has_and_leaves_nothing_behind(tmp_path, network):
    loop, trained = asyncio.get_running_loop(), asyncio.Event()
    told = []
    hub = make_hub(tmp_path, network, on_report=lambda report: told.append(report.event))
    agent = make_agent(network, Adder(100, lambda: loop.call_soon_threadsafe(trained.set)))
    training = asyncio.create_task(agent.run())
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await trained.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        agent.request_stop()
        assert await training == "stopped"
    vector, version = load_model(hub.model_file, SPEC)
    assert version == hub.core.version > 0
    assert np.array_equal(vector, hub._engine.model.current.vector)
    assert told[-1] == "stopping"
    assert (open_files(tmp_path), workers()) == ([], [])


@pytest.mark.asyncio
async def test_a_hub_cancelled_while_it_opens_its_folder_keeps_it_until_it_has_ended(tmp_path, network):
    loop, opening, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def initial():
        loop.call_soon_threadsafe(opening.set)
        go_on.wait(PATIENCE_S)
        return np.zeros(SPEC.length, np.float32)

    hub = make_hub(tmp_path, network, model=HostedModel(spec=SPEC, initial=initial))
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await opening.wait()
        serving.cancel()
        await asyncio.sleep(0)
        with pytest.raises(EdgeAsyncError, match="another hub"):
            await make_hub(tmp_path, network).run()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert open_files(tmp_path) == []


@pytest.mark.asyncio
async def test_a_hub_cancelled_while_it_replays_its_journal_is_cancelled(tmp_path, network, monkeypatch):
    hub = make_hub(tmp_path, network, stop=StopCondition(updates=5))
    await serve(hub, make_agent(network))
    for checkpoint in sorted(tmp_path.glob("checkpoint-*"))[2:]:
        checkpoint.unlink()  # all but the first: there is something to replay
    opening, loop, go_on = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

    make_core = HubOpening._make_core

    def make_slowly(*arguments):
        loop.call_soon_threadsafe(opening.set)
        go_on.wait(PATIENCE_S)
        return make_core(*arguments)

    monkeypatch.setattr(HubOpening, "_make_core", make_slowly)
    settings = run_settings(tmp_path, policy=ONE_BY_ONE, stop=StopCondition(updates=5))
    hub = HubRuntime(settings, zeros(), network=network)
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await opening.wait()
        serving.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await serving
    assert "stopped before the journal was fully replayed" in str(caught.value.__cause__)


@pytest.mark.asyncio
async def test_a_hub_whose_folder_is_gone_says_so_although_it_was_cancelled(tmp_path, network):
    loop, trained = asyncio.get_running_loop(), asyncio.Event()
    hub = make_hub(tmp_path / "run", network)
    agent = make_agent(network, Adder(100, lambda: loop.call_soon_threadsafe(trained.set)))
    training, serving = asyncio.create_task(agent.run()), asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await trained.wait()
        (tmp_path / "run").rename(tmp_path / "moved")
        serving.cancel()
        with pytest.raises(EdgeAsyncError, match="cannot write the checkpoint: "):
            await serving
        agent.request_stop()
        await training


@pytest.mark.asyncio
async def test_a_hub_that_cannot_write_its_model_alone_says_that_it_is_the_model(tmp_path, network):
    told = []

    def on_report(report):
        told.append(report)
        if report.event == "listening":  # by then it has written its first model
            (tmp_path / "model.safetensors.part").mkdir()

    hub = make_hub(tmp_path, network, stop=StopCondition(updates=5), on_report=on_report)
    said = r"cannot write the model: \S*model.safetensors: cannot be written"
    with pytest.raises(EdgeAsyncError, match=said):
        await serve(hub, make_agent(network))
    (warning,) = [report.detail for report in told if report.event == "warning"]
    assert re.match(said, warning)


@pytest.mark.asyncio
async def test_a_hub_that_is_cancelled_twice_waits_for_nothing(tmp_path, network, monkeypatch):
    loop, saving, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    listening = asyncio.Event()

    save_model = HubFiles.save_model

    def save_slowly(self, snapshot, lineage):
        if listening.is_set():
            loop.call_soon_threadsafe(saving.set)
            go_on.wait(PATIENCE_S)
        save_model(self, snapshot, lineage)

    monkeypatch.setattr(HubFiles, "save_model", save_slowly)
    settings = run_settings(tmp_path, policy=ONE_BY_ONE)
    hub = HubRuntime(settings, zeros(), network=network, on_report=lambda _: listening.set())
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await listening.wait()
        serving.cancel()
        await saving.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert not go_on.is_set()
    assert hub._network._channel._socket.closed
    go_on.set()
    assert workers() == []


@pytest.mark.asyncio
async def test_a_run_leaves_no_file_open(tmp_path, network):
    hub = make_hub(tmp_path, network, stop=StopCondition(updates=5))
    assert await serve(hub, make_agent(network)) == "finished"
    assert (open_files(tmp_path), workers()) == ([], [])


# -- evaluators ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_evaluator_that_is_given_is_asked_and_may_tell_numbers_of_numpy(tmp_path, network):
    found = EvaluationResult(np.float64(0.25), np.float32(0.75), np.int64(10))
    stop = StopCondition(accuracy=0.5)
    hub = make_hub(tmp_path, network, stop=stop, evaluation=OFTEN, evaluator=lambda _: found)
    assert await serve(hub, make_agent(network)) == "finished"
    last = hub.core.policy_engine.state.evaluations.last
    assert (last.loss, last.accuracy, type(last.loss)) == (0.25, 0.75, float)


@pytest.mark.asyncio
async def test_training_that_is_to_end_at_an_accuracy_needs_an_evaluator_that_tells_one(tmp_path, network):
    stop = StopCondition(accuracy=0.9)
    hub = make_hub(
        tmp_path, network, stop=stop, evaluation=OFTEN, evaluator=lambda _: EvaluationResult(0.25, None, 10)
    )
    with pytest.raises(
        ConfigError, match=r"stop.accuracy can never be reached: the evaluator returns no accuracy"
    ):
        await serve(hub, make_agent(network))


@pytest.mark.asyncio
@pytest.mark.parametrize("found", [None, EvaluationResult(None, None, 10)])
async def test_an_evaluator_that_tells_something_else_is_an_error(tmp_path, network, found):
    hub = make_hub(tmp_path, network, evaluation=OFTEN, evaluator=lambda _: found)
    with pytest.raises(DataError, match=r"an evaluator returned .*; return Evaluation"):
        await serve(hub, make_agent(network))


def test_an_accuracy_that_ends_training_is_refused_without_an_evaluator(tmp_path, network):
    with pytest.raises(ConfigError, match=r"stop\.accuracy.* evaluator"):
        make_hub(tmp_path, network, stop=StopCondition(accuracy=0.5))


def test_a_hub_that_goes_on_never_begins_before_it_stopped(tmp_path, monkeypatch):
    hub = HubRuntime(run_settings(tmp_path, "tcp://127.0.0.1:*", durability="checkpoint"), zeros())
    monkeypatch.setattr(hub_module, "HubEngine", lambda *_, **__: None)
    generator = random.Random(0)
    for _ in range(100):
        stopped_s, machine_s = generator.uniform(0.0, 10.0), generator.uniform(0.0, 1e6)
        monkeypatch.setattr(hub_module.time, "monotonic", lambda machine_s=machine_s: machine_s)
        hub._run = SimpleNamespace(
            now_s=stopped_s, core=None, sessions=None, model=None, publisher=None, history=None
        )
        hub._make_engine()
        assert hub._now_s() == stopped_s


WEIGHTS = ParameterSpec((Parameter("weights", (3,)),))


class Saver:
    """A worker that does what it is given at once, or when it is told to."""

    def __init__(self, at_once):
        self.at_once = at_once
        self.waiting = []

    def submit(self, work):
        self.waiting.append(work)
        if self.at_once:
            self.run()

    def run(self):
        while self.waiting:
            self.waiting.pop(0)()


@pytest.mark.parametrize("at_once", [True, False])
def test_the_newest_of_the_best_is_written(tmp_path, at_once):
    hub = HubRuntime(run_settings(tmp_path, "tcp://127.0.0.1:*"), zeros(WEIGHTS))
    hub._engine, hub._opened = SimpleNamespace(core=SimpleNamespace(lineage="0" * 16)), True
    saver = Saver(at_once)
    hub._threads._workers = {"save": saver}
    hub._files.folder.take("")
    for number in (1, 2, 3):
        hub.save_best(Snapshot(number, np.full(3, number, np.float32)), 1.0 / number, None)
    saver.run()
    vector, version = load_model(hub.best_file, WEIGHTS)
    hub._files.folder.close()
    assert (vector.tolist(), version) == ([3.0, 3.0, 3.0], 3)
