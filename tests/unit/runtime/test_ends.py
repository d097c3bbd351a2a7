"""How a hub and an agent end: once, whatever ends them, with everything written and nothing left behind."""

import asyncio
import errno
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from edgeasync import EdgeAsyncError, Policy, StepResult
from edgeasync.core.hub.settings import HubCoreSettings, StopCondition
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.errors import ConfigError, DataError
from edgeasync.graphs.model_file import load_model
from edgeasync.host.worker import Worker
from edgeasync.net.network import Network
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.hub import Hub
from edgeasync.training.evaluation import Evaluation
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio

SPEC = SoftmaxModel(inputs=4, classes=2).spec
ONE_BY_ONE = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=4))
ADDRESS = "inproc://hub"
ODD = [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()]
odd_errors = pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)


class Adder:
    """A trainer that adds one to every parameter, and tells of a step of that number."""

    spec = SPEC

    def __init__(self, at=0, tell=lambda: None):
        self._steps, self._at, self._tell = 0, at, tell

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += 1.0
        self._steps += 1
        if self._steps == self._at:
            self._tell()
        return StepResult(1.0, 1)


@pytest.fixture
def network():
    network = Network()
    yield network
    network.close()


def make_hub(run, network, *, settings=HubCoreSettings(), **options):  # noqa: B008 (it is frozen)
    options = {"initial": lambda: np.zeros(SPEC.length, np.float32), "policy": ONE_BY_ONE} | options
    return Hub(spec=SPEC, bind=ADDRESS, run=run, settings=settings, network=network, **options)


def make_agent(network, trainer=None, **options):
    identity = DeviceIdentity("pi", "0" * 32, 1)
    trainer = trainer or Adder()
    return Agent(ADDRESS, identity=identity, make_trainer=lambda _: trainer, network=network, **options)


async def serve(hub, *agents):
    """Run a hub and its agents until the hub has ended; raise what any of them raises."""

    async def until_it_ends():
        reason = await hub.run()
        for agent in agents:
            agent.request_stop()
        return reason

    async with asyncio.timeout(PATIENCE_S):
        serving = asyncio.gather(until_it_ends(), *[agent.run() for agent in agents])
        try:
            return (await serving)[0]
        finally:
            serving.cancel()
            await asyncio.wait((serving,))


def open_files(folder):
    """Return the files below a folder that this process has open."""
    places = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [place for place in places if place.startswith(str(folder))]


def workers():
    """Return the names of the threads of hubs and agents that do not end by themselves."""
    names = ("open", "fold", "journal", "save", "evaluate", "train")
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    for thread in threads:
        thread.join(PATIENCE_S)
    return [thread.name for thread in threads if thread.is_alive()]


def fail(error):
    raise error


# -- whatever the code of others raises ------------------------------------------------------------------------


@odd_errors
async def test_an_evaluator_may_raise_anything(tmp_path, network, error):
    settings = HubCoreSettings(evaluate_every_updates=1, held_out=True)
    hub = make_hub(tmp_path, network, settings=settings, evaluator=lambda _: fail(error))
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*test_ends.py.*in fail") as caught:
        await serve(hub, make_agent(network))
    assert caught.value.__cause__ is error


@odd_errors
async def test_what_makes_the_first_model_may_raise_anything(tmp_path, network, error):
    hub = make_hub(tmp_path, network, initial=lambda: fail(error))
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*test_ends.py.*in fail"):
        await serve(hub)
    assert open_files(tmp_path) == []


@odd_errors
async def test_a_trainer_that_cannot_be_made_may_raise_anything(tmp_path, network, error):
    agent = make_agent(network)
    agent._training._make_trainer = lambda _: fail(error)
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*test_ends.py.*in fail"):
        await serve(make_hub(tmp_path, network), agent)


async def test_what_is_told_to_may_raise_stop_iteration(tmp_path, network):
    def on_report(report):
        if report.event == "joined":
            next(iter(()))

    with pytest.raises(EdgeAsyncError, match=r"raised StopIteration.*test_ends.py.*in on_report"):
        await serve(make_hub(tmp_path, network, on_report=on_report), make_agent(network))


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


async def test_what_an_agent_tells_to_may_raise_stop_iteration(tmp_path, network):
    agent = make_agent(network, on_report=lambda _: next(iter(())))
    with pytest.raises(EdgeAsyncError, match=r"raised StopIteration.*test_ends.py"):
        await serve(make_hub(tmp_path, network), agent)


# -- once ------------------------------------------------------------------------------------------------------


async def test_an_agent_runs_once(network):
    agent = make_agent(network)
    running = asyncio.create_task(agent.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EdgeAsyncError, match="another Agent"):
            await agent.run()
        agent.request_stop()
        assert await running == "stopped"
        with pytest.raises(EdgeAsyncError, match="another Agent"):
            await agent.run()
        agent.request_stop()


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


async def test_an_agent_that_is_stopped_before_it_runs_ends_at_once(network):
    told = []
    agent = make_agent(network, on_report=told.append)
    agent.request_stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await agent.run() == "stopped"
    assert (told, workers()) == ([], [])


async def test_the_loop_goes_on_while_an_agent_waits_for_its_last_step(tmp_path, network, monkeypatch):
    monkeypatch.setattr("edgeasync.runtime.agent.CLOSE_S", PATIENCE_S)
    loop, hub = asyncio.get_running_loop(), make_hub(tmp_path, network)
    turns = []

    def last_step():
        loop.call_soon_threadsafe(agent.request_stop)
        agent._training._stopping.wait(PATIENCE_S)
        for _ in range(10):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S / 2)
            turns.append(True)

    agent = make_agent(network, Adder(3, last_step))
    async with asyncio.timeout(PATIENCE_S):
        serving, training = asyncio.create_task(hub.run()), asyncio.create_task(agent.run())
        assert await training == "stopped"
        hub.request_stop()
        await serving
    assert len(turns) == 10


async def test_a_hub_that_is_stopped_before_it_runs_touches_nothing(tmp_path, network):
    told = []
    hub = make_hub(tmp_path / "run", network, on_report=told.append)
    hub.request_stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await hub.run() == "stopping"
    assert not hub.recovered
    with pytest.raises(EdgeAsyncError, match="has no core before it has read"):
        hub.core  # noqa: B018
    assert (told, list(tmp_path.iterdir()), workers()) == ([], [], [])


# -- cancelled -------------------------------------------------------------------------------------------------


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


async def test_a_cancelled_agent_says_goodbye(tmp_path, network):
    told, loop, trained = [], asyncio.get_running_loop(), asyncio.Event()
    left = asyncio.Event()

    def on_report(report):
        told.append(report.event)
        if report.event == "left":
            left.set()

    hub = make_hub(tmp_path, network, on_report=on_report)
    agent = make_agent(network, Adder(10, lambda: loop.call_soon_threadsafe(trained.set)))
    serving = asyncio.create_task(hub.run())
    training = asyncio.create_task(agent.run())
    async with asyncio.timeout(PATIENCE_S):
        await trained.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        await left.wait()
        hub.request_stop()
        await serving
    assert workers() == []


async def test_a_hub_cancelled_while_it_opens_its_folder_keeps_it_until_it_has_ended(tmp_path, network):
    loop, opening, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def initial():
        loop.call_soon_threadsafe(opening.set)
        go_on.wait(PATIENCE_S)
        return np.zeros(SPEC.length, np.float32)

    hub = make_hub(tmp_path, network, initial=initial)
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


async def test_a_hub_cancelled_while_it_replays_its_journal_is_cancelled(tmp_path, network):
    hub = make_hub(tmp_path, network, settings=HubCoreSettings(stop=StopCondition(updates=5)))
    await serve(hub, make_agent(network))
    for checkpoint in sorted(tmp_path.glob("checkpoint-*"))[2:]:
        checkpoint.unlink()  # all but the first: there is something to replay
    opening, loop, go_on = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

    class Watched(Hub):
        def _make_core(self, *arguments):
            loop.call_soon_threadsafe(opening.set)
            go_on.wait(PATIENCE_S)
            return super()._make_core(*arguments)

    hub = Watched(
        spec=SPEC, initial=lambda: np.zeros(SPEC.length, np.float32), policy=ONE_BY_ONE, bind=ADDRESS,
        run=tmp_path, settings=HubCoreSettings(stop=StopCondition(updates=5)), network=network,
    )  # fmt: skip
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await opening.wait()
        serving.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await serving
    assert "stopped before the journal was replayed" in str(caught.value.__cause__)


async def test_a_hub_whose_folder_is_gone_says_so_although_it_was_cancelled(tmp_path, network):
    loop, trained = asyncio.get_running_loop(), asyncio.Event()
    hub = make_hub(tmp_path / "run", network)
    agent = make_agent(network, Adder(100, lambda: loop.call_soon_threadsafe(trained.set)))
    training, serving = asyncio.create_task(agent.run()), asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await trained.wait()
        (tmp_path / "run").rename(tmp_path / "moved")
        serving.cancel()
        with pytest.raises(EdgeAsyncError, match="at the end no checkpoint could be written"):
            await serving
        agent.request_stop()
        await training


async def test_a_hub_that_cannot_write_its_model_alone_says_that_it_is_the_model(tmp_path, network):
    told = []

    def on_report(report):
        told.append(report)
        if report.event == "listening":  # by then it has written its first model
            (tmp_path / "model.safetensors.part").mkdir()

    settings = HubCoreSettings(stop=StopCondition(updates=5))
    hub = make_hub(tmp_path, network, settings=settings, on_report=on_report)
    said = r"no model could be written: \S*model.safetensors: cannot be written"
    with pytest.raises(EdgeAsyncError, match=f"at the end {said}"):
        await serve(hub, make_agent(network))
    (warning,) = [report.detail for report in told if report.event == "warning"]
    assert re.match(said, warning)


async def test_a_hub_that_is_cancelled_twice_waits_for_nothing(tmp_path, network):
    loop, saving, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    listening = asyncio.Event()

    class SlowDisk(Hub):
        def _save_model(self, snapshot, lineage):
            if listening.is_set():
                loop.call_soon_threadsafe(saving.set)
                go_on.wait(PATIENCE_S)
            super()._save_model(snapshot, lineage)

    hub = SlowDisk(
        spec=SPEC, initial=lambda: np.zeros(SPEC.length, np.float32), policy=ONE_BY_ONE, bind=ADDRESS,
        run=tmp_path, settings=HubCoreSettings(), network=network, on_report=lambda _: listening.set(),
    )  # fmt: skip
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


async def test_a_run_leaves_no_file_open(tmp_path, network):
    hub = make_hub(tmp_path, network, settings=HubCoreSettings(stop=StopCondition(updates=5)))
    assert await serve(hub, make_agent(network)) == "finished"
    assert (open_files(tmp_path), workers()) == ([], [])


# -- evaluators ------------------------------------------------------------------------------------------------


async def test_an_evaluator_that_is_given_is_asked(tmp_path, network):
    settings = HubCoreSettings(evaluate_every_updates=1, stop=StopCondition(accuracy=0.5))
    hub = make_hub(tmp_path, network, settings=settings, evaluator=lambda _: Evaluation(0.25, 0.75, 10))
    assert await serve(hub, make_agent(network)) == "finished"
    last = hub.core.policy_engine.state.evaluations.last
    assert (last.loss, last.accuracy) == (
        0.25,
        0.75,
    )


async def test_training_that_is_to_end_at_an_accuracy_needs_an_evaluator_that_tells_one(tmp_path, network):
    settings = HubCoreSettings(evaluate_every_updates=1, stop=StopCondition(accuracy=0.9))
    hub = make_hub(tmp_path, network, settings=settings, evaluator=lambda _: Evaluation(0.25, None, 10))
    with pytest.raises(ConfigError, match=r"stop.accuracy would never end training: the evaluator returns none"):
        await serve(hub, make_agent(network))


async def test_an_evaluator_may_tell_numbers_of_numpy(tmp_path, network):
    settings = HubCoreSettings(evaluate_every_updates=1, stop=StopCondition(accuracy=0.5))
    found = Evaluation(np.float64(0.25), np.float32(0.75), np.int64(10))
    hub = make_hub(tmp_path, network, settings=settings, evaluator=lambda _: found)
    assert await serve(hub, make_agent(network)) == "finished"
    assert type(hub.core.policy_engine.state.evaluations.last.loss) is float


@pytest.mark.parametrize("found", [None, Evaluation(None, None, 10)])
async def test_an_evaluator_that_tells_something_else_is_an_error(tmp_path, network, found):
    hub = make_hub(
        tmp_path, network, settings=HubCoreSettings(evaluate_every_updates=1), evaluator=lambda _: found
    )
    with pytest.raises(DataError, match=r"an evaluator returned .*; return Evaluation"):
        await serve(hub, make_agent(network))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (HubCoreSettings(held_out=True), "held_out"),
        (HubCoreSettings(stop=StopCondition(accuracy=0.5)), r"stop\.accuracy"),
    ],
    ids=["held_out", "accuracy"],
)
async def test_what_needs_an_evaluator_is_refused_without_one(tmp_path, network, settings, words):
    with pytest.raises(ConfigError, match=f"{words}.* evaluator"):
        make_hub(tmp_path, network, settings=settings)


async def test_work_that_outlasts_its_loop_ends_quietly():
    """The loop is closed by the time the work is done: there is nobody to hand its result or its error to."""
    told, going_on = [], threading.Event()
    worker = Worker("evaluate", told.append)
    worker.start()
    worker.submit(going_on.wait)
    worker.submit(lambda: fail(RuntimeError("the loop is closed")))
    worker.abandon()
    going_on.set()
    worker._thread.join(PATIENCE_S)
    assert told == []
