"""The agent's shell: start, stop, cancellation, and errors in user code."""

import asyncio

import pytest

from edgeasync import EdgeAsyncError
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.workload import Workload
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import Adder, fail, make_agent, make_hub, odd_errors, serve, workers
from tests.support.programs.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio


@odd_errors
async def test_a_trainer_that_cannot_be_made_may_raise_anything(tmp_path, network, error):
    agent = make_agent(network)
    agent.training._workload = Workload(lambda _: fail(error))
    with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*hubs.py.*in fail"):
        await serve(make_hub(tmp_path, network), agent)


async def test_what_an_agent_tells_to_may_raise_stop_iteration(tmp_path, network):
    agent = make_agent(network, on_report=lambda _: next(iter(())))
    with pytest.raises(EdgeAsyncError, match=r"raised StopIteration.*test_agent.py"):
        await serve(make_hub(tmp_path, network), agent)


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
        agent.training.gate.ending.wait(PATIENCE_S)
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


async def test_an_agent_that_is_made_has_read_and_written_nothing(tmp_path, monkeypatch):
    """All that it needs was found before; its state folder need not be there yet."""
    settings, device, workload = agent_parts(
        None, hub="tcp://127.0.0.1:9", spool="full", local=("w",), alone_steps_max=100
    )
    device = device._replace(state=tmp_path / "state")
    device.spool_file()  # whose module is imported the first time
    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr("os.open", fail)
    monkeypatch.setattr("os.mkdir", fail)
    agent = AgentRuntime(settings, device, workload)
    monkeypatch.undo()
    assert (agent.address, list(tmp_path.iterdir())) == ("tcp://127.0.0.1:9", [])
