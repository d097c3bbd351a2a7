"""What an `Agent` in a Python program can do: pause, evaluate, workers, async steps, callbacks of its own."""

import asyncio
import threading
import time

import numpy as np
import pytest

from edgeasync import Agent, EdgeAsyncError, GradientTrainer, Hub, StepResult, Stop, nn, train
from edgeasync.callbacks import EndEvent, EvaluationEvent, ExchangeEvent, JoinEvent, LeaveEvent, StopWhen
from edgeasync.data import batches
from edgeasync.durable.keys import HubKeys
from edgeasync.errors import ConfigError, DataError
from edgeasync.policies.optimizers import SGD
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL, X, plain
from tests.support.programs.processes import PATIENCE_S, until

ONE_BY_ONE = plain()
ENDLESS_S = 3600.0


def trainer():
    return GradientTrainer(MODEL.spec, MODEL.gradient, [SGD(learning_rate=0.1)], batches(DATA, 32, 0))


def applied(hub):
    return hub.status()["updates_applied"]


def live(hub):
    return sum(state not in ("left", "lost", "paused") for state in states(hub).values())


def states(hub):
    return {device["id"]: device["state"] for device in hub.status()["devices"]}


class Line:
    """A model in numpy that notes how many examples it is given at once."""

    def __init__(self):
        self.parameters, self.sizes = {"weight": np.zeros(4)}, set()

    def gradient(self, arrays, x, y):
        self.sizes.add(len(x))
        return 0.0, {"weight": x.mean(0)}


@pytest.mark.parametrize(
    ("hubs", "own", "most"), [({}, {"batch_size": 32, "micro_batch_size": 16}, 16), ({"batch_size": 8}, {}, 8)]
)
def test_a_model_in_numpy_gets_no_more_examples_than_agent_or_hub_say(tmp_path, hubs, own, most):
    model = Line()
    with (
        Hub(Line(), run=tmp_path, bind=ANYWHERE, until=Stop(updates=1), **hubs) as hub,
        Agent(hub.address, DATA, model=model, **own) as agent,
    ):
        agent.wait(PATIENCE_S)
    assert max(model.sizes) == most


class Awaited:
    """A trainer whose steps are awaited, and note the thread they run in."""

    spec = MODEL.spec

    def __init__(self, wait_s=0.0):
        self._trainer, self._wait_s = trainer(), wait_s
        self.threads, self.cancelled, self.begun = set(), 0, asyncio.Event()

    def begin(self, parameters):
        self._trainer.begin(parameters)

    async def step(self):
        self.threads.add(threading.current_thread())
        self.begun.set()
        try:
            await asyncio.sleep(self._wait_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._trainer.step()


# -- callbacks ---------------------------------------------------------------------------------------------


def test_an_agent_tells_its_callbacks_of_its_exchanges(tmp_path):
    seen = []
    newest = {"codec": {"delta": "off"}}  # otherwise an answer so soon after the last may have the version before
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=6), policy=ONE_BY_ONE, settings=newest) as hub,
        Agent(hub.address, DATA, name="pi", callbacks=[seen.append]) as agent,
    ):
        assert agent.wait(PATIENCE_S) == "the hub has finished training"
    exchanges = [event for event in seen if isinstance(event, ExchangeEvent)]
    assert isinstance(seen[0], JoinEvent)
    assert seen[-1] == EndEvent(time_s=seen[-1].time_s, reason="the hub has finished training")
    assert [event.number for event in exchanges][:5] == [1, 2, 3, 4, 5]
    assert [event.version for event in exchanges][:5] == [1, 2, 3, 4, 5]
    for event in exchanges:
        assert (event.device, event.outcome, event.local_steps) == ("pi", "applied", 5)
        assert 0.0 < event.loss < 1.0
        assert event.bytes_up > MODEL.spec.nbytes / 4
        assert event.bytes_down > 50


def test_a_rule_ends_an_agent_alone(tmp_path):
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        with Agent(hub.address, DATA, callbacks=[StopWhen("loss", below=0.6)]) as agent:
            assert agent.wait(PATIENCE_S).endswith("is below 0.6")
        assert hub.status()["version"] >= 0


# -- pause -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "still"])
def test_a_paused_agent_is_silent_and_then_returns(tmp_path, training):
    told = []
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE, policy=ONE_BY_ONE) as hub,
        Agent(hub.address, DATA, name="pi", callbacks=[told.append]) as agent,
    ):
        until(lambda: agent.updates_answered >= 3, "updates")
        agent.pause(training=training)
        until(lambda: not live(hub), "a goodbye")
        assert states(hub) == {"pi": "paused"}
        (worker,) = agent._workers
        sent, steps, done = (
            (worker.agent.network.bytes_up, worker.agent.network.bytes_down),
            worker.agent.training.gate.steps_total,
            applied(hub),
        )
        if training:
            until(lambda: worker.agent.training.gate.steps_total > steps + 50, "steps without the hub")
        else:
            time.sleep(0)  # a step that was running may end
            before = worker.agent.training.gate.steps_total
            assert before <= steps + 1
            assert agent.evaluate(DATA).version >= 1, "without waiting for training"
            assert worker.agent.training.gate.steps_total <= before + 1
        assert (worker.agent.network.bytes_up, worker.agent.network.bytes_down) == sent
        assert applied(hub) == done
        agent.resume()
        agent.resume()
        until(lambda: applied(hub) > done + 2, "updates after the pause")
        assert states(hub) == {"pi": "training"}
        if training:
            longest = max(event.local_steps for event in told if isinstance(event, ExchangeEvent))
            assert longest > 50, "what was trained in the pause is part of an update"
    assert not [event for event in told if isinstance(event, LeaveEvent)], "a pause is no loss of the hub"


def test_a_paused_agent_can_be_stopped(tmp_path):
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub, Agent(hub.address, DATA) as agent:
        agent.wait_until_joined(PATIENCE_S)
        agent.pause()
        agent.pause(training=True)
        agent.pause()
    assert agent.wait() == "stopped"
    with pytest.raises(EdgeAsyncError, match="this Agent has ended"):
        agent.resume()


# -- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "graph"])
def test_an_agent_evaluates_the_newest_model(tmp_path, kind):
    network = MODEL if kind == "numpy" else nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    seen = []
    with (
        Hub(network, run=tmp_path, bind=ANYWHERE, input_shape=(4,), evaluate=DATA) as hub,
        Agent(hub.address, DATA, callbacks=[seen.append]) as agent,
    ):
        until(lambda: applied(hub) >= 30, "updates")
        agent.pause()
        found = agent.evaluate((X, DATA.y))
        assert found.version >= 5
        assert 0.5 < found.accuracy <= 1.0
        own = agent.evaluate(lambda arrays: float(sum(np.abs(array).sum() for array in arrays.values())))
        assert (own.version, own.accuracy) == (found.version, None)
        with pytest.raises(DataError, match=r"features|shape"):
            agent.evaluate((X[:, :3], DATA.y))
    assert [event for event in seen if isinstance(event, EvaluationEvent)] == [found, own]


def test_an_agent_without_a_model_says_so(tmp_path):
    with Agent("tcp://127.0.0.1:9", DATA) as agent, pytest.raises(EdgeAsyncError, match="has no model yet"):
        agent.evaluate(DATA)
    arrays = dict(MODEL.spec.views(MODEL.initial(0)))
    with Hub(arrays, run=tmp_path, bind=ANYWHERE) as hub, Agent(hub.address, trainer=trainer()) as agent:
        until(lambda: agent.updates_answered, "an update")
        with pytest.raises(ConfigError, match="pass evaluate as a function of the named arrays"):
            agent.evaluate(DATA)


# -- several workers ---------------------------------------------------------------------------------------


def test_workers_of_one_agent_are_devices_of_their_own(tmp_path):
    with Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE) as hub:
        for number in range(2):
            with Agent(hub.address, DATA, name="pi", workers=3, state=tmp_path / "pi") as agent:
                agent.wait_until_joined(PATIENCE_S)
                until(lambda agent=agent: agent.updates_answered >= 6, "updates")
                status = hub.status()["devices"]
                assert sorted(device["id"] for device in status) == ["pi/0", "pi/1", "pi/2"]
                assert live(hub) == 3
                assert number == 0 or all(device["updates_applied"] for device in status), "they are known again"
    assert sorted(path.name for path in (tmp_path / "pi").iterdir()) == ["0", "1", "2"]


def test_workers_have_data_of_their_own_and_pause_together(tmp_path):
    parts = [DATA.take(np.arange(50)), DATA.take(np.arange(50, 120))]
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub, Agent(hub.address, parts) as agent:
        agent.wait_until_joined(PATIENCE_S)
        found = hub.status()["devices"]
        assert sorted(len(worker._training.part) for worker in agent._workers) == [50, 70]
        assert len({device["id"].rpartition("/")[0] for device in found}) == 1
        agent.pause()
        until(lambda: not live(hub), "goodbyes")
        assert set(states(hub).values()) == {"paused"}
        agent.resume()
        hub.wait_for(devices=2, timeout_s=PATIENCE_S)
        hub.finish()
        assert agent.wait(PATIENCE_S) == "the hub has finished training"


def test_workers_share_the_key_that_a_token_enrols(tmp_path):
    keys = HubKeys.init(tmp_path / "keys")
    with Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, keys=tmp_path / "keys") as hub:
        token = keys.issue_token("pi", (hub.address,), time.time()).text()
        for again in ({"enrol": token}, {"enrol": token}, {}):
            with Agent(data=DATA, state=tmp_path / "pi", workers=2, **again) as agent:
                agent.wait_until_joined(PATIENCE_S)
                assert sorted(device["id"] for device in hub.status()["devices"]) == ["pi/0", "pi/1"]


def test_one_worker_that_fails_ends_all(tmp_path):
    class Failing(Awaited):
        async def step(self):
            raise ValueError("the sensor is gone")

    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub,
        pytest.raises(ValueError, match="the sensor is gone"),
        Agent(hub.address, trainer=[trainer(), Failing()]) as agent,
    ):
        agent.wait(PATIENCE_S)


def test_two_agents_without_a_name_are_two_devices(tmp_path):
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub,
        Agent(hub.address, DATA) as one,
        Agent(hub.address, DATA) as other,
    ):
        for agent in (one, other):
            agent.wait_until_joined(PATIENCE_S)
        assert len({device["id"] for device in hub.status()["devices"]}) == 2


# -- steps -------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_async_steps_are_awaited_on_the_agents_loop(tmp_path):
    trainers = [Awaited(), Awaited(0.001)]
    async with (
        asyncio.timeout(PATIENCE_S),
        Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=10)) as hub,
        Agent(hub.address, trainer=trainers) as agent,
    ):
        assert await agent.wait_async() == "the hub has finished training"
    assert trainers[0].threads == trainers[1].threads == {threading.current_thread()}


def test_async_steps_train_together_with_others():
    arrays = dict(MODEL.spec.views(MODEL.initial(0)))
    run = train(arrays, [Awaited(), trainer()], until=Stop(updates=20))
    assert all(device["updates_applied"] for device in run.devices)


@pytest.mark.asyncio
async def test_a_cancel_ends_a_long_step_at_once(tmp_path):
    slow = Awaited(ENDLESS_S)

    async def serve(hub):
        async with Agent(hub.address, trainer=slow) as agent:
            await agent.wait_async()

    async with asyncio.timeout(PATIENCE_S), Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub:
        serving = asyncio.create_task(serve(hub))
        await slow.begun.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert slow.cancelled == 1
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not [thread for thread in threading.enumerate() if thread.name == "train"]


def test_epochs_and_batches_of_a_device_override_the_hubs(tmp_path):
    told = []
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=4), batch_size=8, policy=ONE_BY_ONE) as hub,
        Agent(hub.address, DATA, batch_size=50, epochs=2, callbacks=[told.append]) as agent,
    ):
        agent.wait(PATIENCE_S)
    exchanges = [event for event in told if isinstance(event, ExchangeEvent)]
    assert {(event.local_steps, event.examples) for event in exchanges} == {(8, 400)}


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": DATA, "workers": 0}, "workers is 0; pass 1 or more"),
        ({"data": [DATA, DATA], "workers": 3}, "workers is 3, but the list has 2 entries"),
        ({"data": []}, "the list is empty"),
        ({"trainer": Awaited(), "workers": 2}, "workers is 2, but there is one trainer: pass a list"),
        ({"data": DATA, "workers": 2, "name": "pi/1"}, "edgeasync adds '/' and a number for each worker"),
        ({"data": DATA, "epochs": 0}, "epochs counts passes over the data: set it above 0"),
        ({"trainer": Awaited(), "epochs": 1}, "epochs counts passes over the data: .* instead of a trainer"),
        ({"trainer": [Awaited()] * 2}, "workers 1 and 2 share a trainer object: create one for each"),
    ],
)
def test_a_mistake_says_what_to_give(given, words):
    with pytest.raises(ConfigError, match=words):
        Agent("tcp://127.0.0.1:9", **given).start()


@pytest.mark.asyncio
async def test_a_wait_on_the_own_loop_says_what_to_write(tmp_path):
    async with Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub, Agent(hub.address, DATA) as agent:
        for wait, words in (
            (hub.wait, r"wait\(\) would block the loop .* write `await hub\.wait_async\(\)`"),
            (lambda: hub.wait_for(1), r"write `await hub\.wait_for_async\(devices\)`"),
            (agent.wait, r"write `await agent\.wait_async\(\)`"),
            (agent.wait_until_joined, r"write `await asyncio\.to_thread\(agent\.wait_until_joined\)`"),
            (lambda: agent.evaluate(DATA), r"write `await asyncio\.to_thread\(agent\.evaluate, data\)`"),
        ):
            with pytest.raises(ConfigError, match=words):
                wait()


def test_a_wait_in_a_callback_says_what_to_do(tmp_path, caplog):
    def wait(event):
        hub.wait()

    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, callbacks=[wait], until=Stop(updates=3)) as hub:
        with Agent(hub.address, DATA) as agent:
            agent.wait(PATIENCE_S)
        hub.wait(PATIENCE_S)
    assert (
        "wait() would never return in a callback, because it would wait for that callback: return, or raise "
        "callbacks.StopTraining" in caplog.text
    )


def test_a_step_that_returns_nothing_is_told(tmp_path):
    class Wordless(Awaited):
        async def step(self):
            return StepResult("good", 1)

    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub,
        pytest.raises(DataError, match="return StepResult"),
        Agent(hub.address, trainer=Wordless()) as agent,
    ):
        agent.wait(PATIENCE_S)
