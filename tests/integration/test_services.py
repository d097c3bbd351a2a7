"""`Hub` and `Agent` in a Python program: with, async with, start and wait; used from any thread."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from edgeasync import Agent, EdgeAsyncError, Hub, Run, Stop, nn
from edgeasync.durable.keys import HubKeys
from edgeasync.durable.spool_file import SPOOL_FILE
from edgeasync.errors import ConfigError, DataError
from edgeasync.sdk import events
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL, Still, X
from tests.support.programs.journals import pushes_in
from tests.support.programs.processes import PATIENCE_S, free_address, until, wait_for_threads


def test_a_hub_and_two_agents_by_with(tmp_path):
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    seen = []
    with Hub(
        network, input_shape=(4,), run=tmp_path, bind=ANYWHERE, evaluate=DATA, callbacks=[seen.append],
        settings={"evaluation": {"every": "5 updates"}},
    ) as hub:  # fmt: skip
        with Agent(hub.address, DATA, name="a") as one, Agent(hub.address, DATA, name="b", batch_size=64) as other:
            hub.wait_for(devices=2, timeout_s=PATIENCE_S)
            for agent in (one, other):
                agent.wait_until_joined(PATIENCE_S)
            before = hub.snapshot()
            until(lambda: hub.status()["updates_applied"] >= 20, "updates")
            assert {device["id"] for device in hub.status()["devices"]} == {"a", "b"}
            assert any(not np.array_equal(array, before[name]) for name, array in hub.snapshot().items())
            assert one.updates_answered
        assert one.wait() == "stopped"
    assert hub.wait() == "stopping"
    assert Run.open(tmp_path).version >= 10
    kinds = {type(event) for event in seen}
    assert kinds >= {events.Join, events.Leave, events.Update, events.Version, events.Evaluation, events.End}
    with pytest.raises(EdgeAsyncError, match=r"this Hub has ended; read its run with Run\.open\(hub\.path\)"):
        hub.status()
    with pytest.raises(EdgeAsyncError, match="this Hub has already run"):
        hub.start()


@pytest.mark.asyncio
async def test_events_on_the_callers_loop(tmp_path):
    async def listen(hub):
        return [event async for event in hub.events()]

    async with asyncio.timeout(PATIENCE_S), Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=20)) as hub:
        listening = asyncio.create_task(listen(hub))
        await asyncio.sleep(0)  # it listens now, before the agent joins
        async with Agent(hub.address, DATA) as agent:
            seen = await listening
            assert await agent.wait_async() == "the hub has finished training"
        assert [type(seen[0]), type(seen[-1])] == [events.Join, events.End]
        assert sum(isinstance(event, events.Update) for event in seen) >= 20
        assert (await hub.wait_async()).endswith("updates applied")
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def test_an_agent_waits_for_its_hub_and_for_its_return(tmp_path):
    address = free_address()
    with Agent(address, DATA, name="a", state=tmp_path / "a") as agent:
        with pytest.raises(TimeoutError, match=r"no hub accepted this device within 0\.1 s"):
            agent.wait_until_joined(0.1)
        for _ in range(2):
            with Hub(MODEL, run=tmp_path / "run", bind=address) as hub:
                hub.wait_for(devices=1, timeout_s=PATIENCE_S)
    assert agent.wait() == "stopped"


def test_an_enrolled_agent_has_the_name_of_its_token_and_keeps_its_spool(tmp_path):
    keys = HubKeys.init(tmp_path / "keys")
    with Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, keys=tmp_path / "keys") as hub:
        token = keys.issue_token("pi-1", (hub.address,), time.time()).text()
        with Agent(data=DATA, state=tmp_path / "pi", enrol=token, spool="full") as agent:
            agent.wait_until_joined(PATIENCE_S)
            assert [device["id"] for device in hub.status()["devices"]] == ["pi-1"]
            until(lambda: agent.updates_answered, "an update")
        with Agent(data=DATA, state=tmp_path / "pi") as again:
            again.wait_until_joined(PATIENCE_S)
    assert (tmp_path / "pi" / SPOOL_FILE).exists()


@pytest.mark.parametrize("way", ["finish", "when"])
def test_a_run_that_is_finished_ends_its_agents(tmp_path, way):
    ends = Stop(when=lambda progress: progress.updates >= 5) if way == "when" else None
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=ends) as hub, Agent(hub.address, DATA) as agent:
        if way == "finish":
            until(lambda: hub.status()["updates_applied"] >= 5, "updates")
            hub.finish("good enough")
        assert agent.wait(PATIENCE_S) == "the hub has finished training"
        assert hub.wait(PATIENCE_S) == ("good enough" if way == "finish" else "Stop(when=...) returned true")
        hub.finish("too late")
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub, Agent(hub.address, DATA):
        done = hub.status()["updates_applied"]
        until(lambda: hub.status()["updates_applied"] > done, "a run that resumes after its end")


class Failing(Still):
    def step(self):
        raise ValueError("the sensor is gone")


def test_what_ends_an_agent_is_raised_where_it_is_waited_for(tmp_path):
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        with pytest.raises(ValueError, match="the sensor is gone"), Agent(hub.address, trainer=Failing()) as agent:
            agent.wait(PATIENCE_S)
        with Agent(hub.address, trainer=Still(), name="still") as agent:
            hub.wait_for(devices=1, timeout_s=PATIENCE_S)
            with pytest.raises(TimeoutError):
                agent.wait(0.01)


def test_mistakes_are_told_at_once(tmp_path):
    with Hub(MODEL, run=tmp_path / "one", bind=ANYWHERE) as hub:
        with pytest.raises(EdgeAsyncError, match="another hub is using this folder"):
            Hub(MODEL, run=tmp_path / "one", bind=ANYWHERE).start()
        with pytest.raises(DataError, match="no such file"), Agent(hub.address, "missing.npz"):
            pass
    with pytest.raises(ConfigError, match=r"until\.epochs does not work with Hub, which has no data"):
        Hub(MODEL, run=tmp_path, until=Stop(epochs=1))
    with (
        pytest.raises(ConfigError, match=r"layers .* input_shape=\(64,\) to Hub"),
        Hub(nn.Linear(4, 2), run=tmp_path / "3"),
    ):
        pass
    with pytest.raises(ConfigError, match="pass exactly one of data and trainer"):
        Agent("tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="enrol needs a folder"):
        Agent(data=DATA, enrol="token").start()
    with pytest.raises(ConfigError, match="spool = 'full' needs a folder"):
        Agent("tcp://127.0.0.1:5555", DATA, spool="full").start()
    with pytest.raises(ConfigError, match="device_id is not a setting of"):
        Agent("tcp://127.0.0.1:5555", DATA, device_id="a")
    with pytest.raises(ConfigError, match="local_step_max"):
        Agent("tcp://127.0.0.1:5555", DATA, local_step_max=3)


@pytest.mark.asyncio
async def test_a_cancel_is_of_who_waits(tmp_path):
    async with asyncio.timeout(PATIENCE_S), Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        for wait in (hub.wait_async(), hub.wait_for_async(1)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait, 0.01)
        async with Agent(hub.address, DATA):
            await hub.wait_for_async(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["hub", "agent"])
async def test_a_start_that_is_cancelled_leaves_nothing_running(tmp_path, kind):
    hub = Hub(MODEL, run=tmp_path, bind=ANYWHERE)
    service = hub if kind == "hub" else Agent("tcp://127.0.0.1:9", DATA)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), service:
            pass
    assert (await asyncio.to_thread(service.wait, 0)).startswith("stop")


def test_who_stops_to_listen_harms_nobody(tmp_path):
    async def first(hub):
        return await anext(hub.events())

    async def listen_and_go(hub):
        events = hub.events()
        asyncio.get_running_loop().create_task(anext(events))
        await asyncio.sleep(0)  # it listens now, and this loop ends

    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        asyncio.run(listen_and_go(hub))
        with Agent(hub.address, DATA):
            assert asyncio.run(first(hub)) is not None
            done = hub.status()["updates_applied"] + 5
            until(lambda: hub.status()["updates_applied"] >= done, "updates")


def test_who_waits_for_devices_hears_of_the_end(tmp_path):
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        threading.Timer(0.05, hub.stop).start()
        with pytest.raises(EdgeAsyncError, match="the hub has ended: stopping"):
            hub.wait_for(devices=1, timeout_s=PATIENCE_S)


class LongEnd:
    """A callback whose end lasts, so that the hub's does."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def on_end(self, event):
        self.begun.set()
        self.let_go.wait(PATIENCE_S)


async def first_event(hub):
    return await anext(hub.events())


@pytest.mark.parametrize(
    "wait",
    [
        lambda hub: hub.wait_for(1, 0.01),
        lambda hub: hub.wait_until_left(0.01),
        lambda hub: asyncio.run(asyncio.wait_for(hub.wait_for_async(1), 0.01)),
        lambda hub: asyncio.run(asyncio.wait_for(hub.wait_until_left_async(), 0.01)),
        lambda hub: asyncio.run(asyncio.wait_for(first_event(hub), 0.01)),
    ],
    ids=["for", "until_left", "for_async", "until_left_async", "events"],
)
def test_who_begins_to_wait_while_the_hub_ends_hears_of_it(tmp_path, wait):
    last = LongEnd()
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, callbacks=[last]) as hub:
        hub.stop()
        assert last.begun.wait(PATIENCE_S)
        try:
            with pytest.raises(EdgeAsyncError, match="this Hub has ended"):
                wait(hub)
        finally:
            last.let_go.set()


def test_nothing_is_left_behind(tmp_path):
    def go(number):
        with Hub(MODEL, run=tmp_path / str(number), bind=ANYWHERE) as hub, Agent(hub.address, DATA):
            hub.wait_for(devices=1, timeout_s=PATIENCE_S)
        gc.collect()

    go(0)
    before = threading.active_count()
    for number in range(1, 4):
        go(number)
    wait_for_threads(before)


def test_a_hub_refuses_what_its_devices_would(tmp_path):
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    for said, words in (
        ({"accumulation_steps": 4}, "different statistics on parts of a batch; remove accumulation_steps"),
        ({"metrics": ["mae"]}, "mae does not apply to the loss cross_entropy"),
    ):
        with (
            pytest.raises(ConfigError, match=words),
            Hub(network, input_shape=(4,), run=tmp_path, bind=ANYWHERE, **said),
        ):
            pass


def weights(arrays):
    return float(np.abs(arrays["layer0.weight"]).sum())


@pytest.mark.parametrize("validation", [0.25, (X, DATA.y), weights])
def test_an_update_tells_the_loss_of_the_devices_own_parameters(tmp_path, validation):
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=10)) as hub,
        Agent(hub.address, DATA, name="pi", validation=validation, local_steps_max=4) as agent,
    ):
        agent.wait()
    pushes = pushes_in(tmp_path)
    assert len(pushes) >= 10
    told = [push.validation_loss for push in pushes]
    assert all(loss > 0 for loss in told)
    assert told[-1] > told[0] if callable(validation) else told[-1] < told[0]
    assert {push.score for push in pushes} == {None}


@pytest.mark.parametrize(
    ("validation", "sentence"),
    [(1.5, "validation is 1.5 of 200 examples"), (0, "validation is 0 of"), (0.001, "hold out at least one")],
)
def test_a_share_that_leaves_nothing_is_refused(validation, sentence):
    with (
        pytest.raises(ConfigError, match=sentence),
        Agent("tcp://127.0.0.1:9", DATA, validation=validation) as agent,
    ):
        agent.wait()
