"""A loop of the user's own takes part in a run, by real sockets."""

import contextlib
import logging
import shutil
import threading

import msgspec
import numpy as np
import pytest

import edgeasync
from edgeasync import Hub, Stop, join, nn
from edgeasync.errors import ModelMismatchError, RefusedError
from edgeasync.networks import Network
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk import user_loop
from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.participants import ArrayParticipant
from tests.support.parts.small_runs import plain
from tests.support.programs.journals import pushes_in
from tests.support.programs.processes import free_address, until

POLICY = plain(4)
FLOAT32 = {"codec": {"push": "identity", "model": "identity", "delta": "off"}}
TARGET = np.arange(6, dtype=np.float32)
PATIENCE_S = 30.0


@pytest.fixture
def hub(tmp_path):
    run = tmp_path / "run"
    with Hub({"w": np.zeros(6)}, run=run, bind="tcp://127.0.0.1:*", policy=POLICY, settings=FLOAT32) as hub:
        yield hub


def take_steps(model, session, count):
    for _ in range(count):
        model["w"] += 0.1 * (TARGET - model["w"])
        session.step(loss=float(np.square(TARGET - model["w"]).mean()), examples=3)


def test_every_step_of_the_loop_is_part_of_an_update(hub):
    model = {"w": np.full(6, 9.0, np.float32)}
    with join(hub.address, model, name="mine", timeout_s=PATIENCE_S) as session:
        assert (session.version, list(model["w"])) == (0, [0.0] * 6), "the hub's values at once"
        take_steps(model, session, 4)
        assert (session.exchanges, session.steps_since_exchange, session.version) == (2, 0, 1)
        take_steps(model, session, 23)
        assert session.steps == 27
    (device,) = hub.status()["devices"]
    assert device["updates_applied"] == 7, "the last, short one included"
    np.testing.assert_allclose(hub.snapshot()["w"], model["w"], rtol=1e-5)


def test_a_loop_that_begins_with_its_own_values_brings_them_in(hub):
    model = {"w": np.full(6, 9.0, np.float32)}
    with join(hub.address, model, name="mine", own_start=True, timeout_s=PATIENCE_S) as session:
        assert list(model["w"]) == [9.0] * 6
        take_steps(model, session, 4)
        np.testing.assert_allclose(hub.snapshot()["w"], model["w"], rtol=1e-5)
        assert model["w"][0] > 5.0, "an update of its own values, not of the hub's"
        take_steps(model, session, 4)
    np.testing.assert_allclose(hub.snapshot()["w"], model["w"], rtol=1e-5)


def test_a_loop_tells_the_score_of_its_model_once(hub):
    model = {"w": np.zeros(6, np.float32)}
    with join(hub.address, model, name="mine", timeout_s=PATIENCE_S) as session:
        for steps in range(12):
            if steps in (1, 3, 9):
                session.note(score=float(steps))
            take_steps(model, session, 1)
    assert [push.validation_loss for push in pushes_in(hub.path)] == [3.0, None, 9.0]


def test_a_loop_that_starts_over_forgets_its_optimizer(tmp_path, monkeypatch):
    policy = msgspec.structs.replace(POLICY, behind_max=2.0, preempt=True)
    forgotten = []
    monkeypatch.setattr(ArrayParticipant, "reset_optimizer", lambda _: forgotten.append(session.steps))
    model = {"w": np.zeros(6, np.float32)}
    with (
        Hub({"w": np.zeros(6)}, run=tmp_path, bind="tcp://127.0.0.1:*", policy=policy, settings=FLOAT32) as hub,
        join(hub.address, model, name="mine", keep_optimizer_state=True, timeout_s=PATIENCE_S) as session,
    ):
        for score in (1.0, 1.0, 9.0, 1.0):
            session.note(score=score)
            take_steps(model, session, 4)
    assert forgotten == [12]


def test_a_loop_keeps_its_own_values_of_local_arrays(tmp_path):
    arrays = {"head": np.zeros(2), "w": np.zeros(6)}
    run, state = tmp_path / "run", tmp_path / "state"
    with Hub(arrays, run=run, bind="tcp://127.0.0.1:*", policy=POLICY, settings=FLOAT32, local=["head"]) as hub:
        for start in (1.0, 2.0):
            model = {name: array.astype(np.float32) for name, array in arrays.items()}
            with join(hub.address, model, name="mine", state=state, timeout_s=PATIENCE_S) as session:
                assert (model["head"] == start - 1.0).all()
                for _ in range(8):
                    model["head"][:] = start
                    take_steps(model, session, 1)
                assert (model["head"] == start).all()
                assert session.evaluate(lambda: float(model["head"][0])) == start  # noqa: B023
        found = hub.snapshot()
    assert not found["head"].any()
    assert found["w"][1:].all()


def test_the_loop_ends_with_the_run(tmp_path):
    model = {"w": np.zeros(6, np.float32)}
    hub = Hub({"w": np.zeros(6)}, run=tmp_path, bind="tcp://127.0.0.1:*", policy=POLICY, until=Stop(updates=3))
    with hub, join(hub.address, model, timeout_s=PATIENCE_S) as session:
        taken = 0
        while not session.finished:
            for _ in session.batches([1, 2, 3]):
                take_steps(model, session, 1)
                taken += 1
        assert 12 <= taken <= 16, "the goodbye comes right behind the last model"
        assert session.finished
        before = model["w"].copy()
        take_steps(model, session, 2)  # a loop that does not look trains on by itself
    assert (model["w"][1:] != before[1:]).all()


def test_another_model_is_told_by_the_array(hub):
    with pytest.raises(
        ModelMismatchError, match=r"'w' is trained of shape \(5,\) here, but trained of \(6,\) at the hub"
    ):
        join(hub.address, {"w": np.zeros(5, np.float32)}, timeout_s=PATIENCE_S)
    with pytest.raises(ModelMismatchError, match="your model has an array 'b'"):
        join(hub.address, {"w": np.zeros(6, np.float32), "b": np.zeros(1, np.float32)}, timeout_s=PATIENCE_S)
    with pytest.raises(edgeasync.EdgeAsyncError, match="model is int; pass a torch"):
        join(hub.address, 3)


def interrupted(*_):
    raise KeyboardInterrupt


def sessions():
    return [thread for thread in threading.enumerate() if thread.name == "edgeasync-joinedloop"]


def test_a_start_that_is_interrupted_leaves_no_session(hub, monkeypatch):
    monkeypatch.setattr(Lockstep, "await_turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        join(hub.address, {"w": np.zeros(6, np.float32)}, timeout_s=PATIENCE_S)
    assert not sessions()


def test_an_end_that_is_interrupted_leaves_no_session(hub, monkeypatch):
    model = {"w": np.zeros(6, np.float32)}
    session = join(hub.address, model, timeout_s=PATIENCE_S)
    take_steps(model, session, 1)
    monkeypatch.setattr(Lockstep, "end", interrupted)
    with pytest.raises(KeyboardInterrupt), session:
        assert sessions()
    assert not sessions()


def test_without_a_hub_the_loop_trains_on(caplog):
    model = {"w": np.zeros(6, np.float32)}
    with join("tcp://127.0.0.1:9", model, timeout_s=0.2) as session:
        take_steps(model, session, 3)
        assert (session.steps, session.version) == (0, None)
    assert "the loop trains alone" in caplog.text
    assert (model["w"][1:] > 0).all()


def test_evaluate_sees_the_hubs_model_and_puts_the_loops_back(hub):
    model = {"w": np.zeros(6, np.float32)}
    with join(hub.address, model, timeout_s=PATIENCE_S) as session:
        take_steps(model, session, 6)
        own = model["w"].copy()
        seen = session.evaluate(model["w"].copy)
        np.testing.assert_array_equal(model["w"], own)
        np.testing.assert_array_equal(seen, hub.snapshot()["w"])
        assert (seen != own).any()


def test_between_abort_and_resume_nothing_is_sent_and_the_model_is_the_loops(hub):
    model = {"w": np.zeros(6, np.float32)}
    with join(hub.address, model, timeout_s=PATIENCE_S) as session:
        take_steps(model, session, 4)
        session.abort()
        before = hub.status()["updates_applied"]
        take_steps(model, session, 20)
        assert (session.steps, hub.status()["updates_applied"]) == (4, before)
        moved = model["w"].copy()
        session.resume()
        np.testing.assert_array_equal(model["w"], moved)
        take_steps(model, session, 4)
        assert session.steps == 8
    assert hub.status()["updates_applied"] > before


def test_who_leaves_right_after_it_resumed_is_not_waited_for(hub):
    model = {"w": np.zeros(6, np.float32)}
    with join(hub.address, model, timeout_s=PATIENCE_S) as session:
        take_steps(model, session, 4)
        session.abort()
        session.resume()
    until(lambda: hub.status()["devices"][0]["state"] in ("left", "lost"), "the end")
    assert hub.status()["devices"][0]["state"] == "left", "it said goodbye"


@pytest.mark.parametrize("kept", [False, True])
def test_a_loop_goes_alone_and_exchanges_again_when_the_hub_is_back(tmp_path, kept):
    address, model = free_address(), {"w": np.zeros(6, np.float32)}

    def serve():
        run = tmp_path / "run"
        return Hub(
            {"w": np.zeros(6)}, run=run, bind=address, policy=POLICY, settings=FLOAT32 | {"hub": {"quiet": False}}
        )

    state = tmp_path / "device" if kept else None
    with serve():
        session = join(address, model, name="mine", state=state, timeout_s=PATIENCE_S)
        take_steps(model, session, 10)
    with session:
        take_steps(model, session, 30)
        alone = session.exchanges
        with serve() as hub:

            def exchanged():
                take_steps(model, session, 1)
                return session.exchanges > alone + 1

            until(exchanged, "exchanges")
            session.__exit__(None, None, None)
            (device,) = hub.status()["devices"]
            assert device["updates_applied"] > 3


def test_sessions_without_name_and_state_have_names_of_their_own(hub):
    models = [{"w": np.zeros(6, np.float32)} for _ in range(3)]
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(join(hub.address, model, timeout_s=PATIENCE_S)) for model in models]
        for model, session in zip(models, sessions, strict=True):
            take_steps(model, session, 9)
        devices = hub.status()["devices"]
    assert len(devices) == 3
    assert all(device["updates_applied"] for device in devices)


def test_a_second_live_session_of_a_name_is_told_to_take_another(tmp_path, caplog):
    model, other = ({"w": np.zeros(6, np.float32)} for _ in range(2))
    liveness = {"liveness": {"heartbeat_s": 0.1, "lease_s": 0.3}}
    hub = Hub({"w": np.zeros(6)}, run=tmp_path / "run", bind="tcp://127.0.0.1:*", settings=liveness)
    with hub, join(hub.address, model, name="mine", state=tmp_path / "one", timeout_s=PATIENCE_S):
        second = join(hub.address, other, name="mine", state=tmp_path / "two", timeout_s=0.1)
        until(lambda: second.finished, "the end of the second session")
        assert not second.connected
        with pytest.raises(RefusedError, match=r"a device named mine is already connected; .*name= in Python"):
            second.step()
    assert "name= in Python" in caplog.text


def test_a_loop_that_trains_alone_says_so_until_the_hub_is_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(user_loop, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(user_loop, "WARN_EVERY_S", 0.2)
    address, model = free_address(), {"w": np.zeros(6, np.float32)}

    def serve():
        return Hub({"w": np.zeros(6)}, run=tmp_path / "run", bind=address, policy=POLICY, settings=FLOAT32)

    def warned(words):
        return sum(words in record.message for record in caplog.records if record.levelno == logging.WARNING)

    with serve():
        session = join(address, model, name="mine", timeout_s=PATIENCE_S)
        assert session.connected
        take_steps(model, session, 10)
        assert not warned("training alone")
    with session:
        until(lambda: warned("training alone: ") >= 2, "warnings, again and again")
        assert not session.connected
        with serve():
            until(lambda: session.connected, "the connection")
            until(lambda: warned("connected after"), "the end of it is told")
            session.__exit__(None, None, None)
    assert not session.connected


def test_a_network_joins_with_its_statistics(tmp_path):
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    network, x, y = Network(layers, (3,)), np.eye(3, dtype=np.float32), np.array([0, 1, 0])
    with (
        Hub(network, run=tmp_path, bind="tcp://127.0.0.1:*", policy=POLICY, settings=FLOAT32) as hub,
        join(hub.address, network, timeout_s=PATIENCE_S) as session,
    ):
        for _ in range(8):
            network.vector -= 0.1 * network.gradient(x, y).vector
            session.step()
        assert session.exchanges == 3
        for name, array in hub.snapshot().items():
            np.testing.assert_allclose(array, network.arrays[name], rtol=1e-4, atol=1e-6)
        with pytest.raises(TimeoutError, match="devices are still live"):
            hub.wait_until_left(timeout_s=0.01)
        session.abort()
        hub.wait_until_left(PATIENCE_S)


class Held:
    """A model with frozen arrays, as `join` sees one of torch."""

    def __init__(self, frozen):
        self.spec = ParameterSpec((Parameter("w", (6,)),))
        self.arrays = {"w": np.zeros(6, np.float32)}
        self.frozen = Frozen("torch", frozen * 32)


def test_a_killed_hub_knows_which_frozen_arrays_came_first(hub, tmp_path):
    first = Held("a")
    with join(hub.address, first, name="first", timeout_s=PATIENCE_S) as session:
        take_steps(first.arrays, session, 4)
        shutil.copytree(hub.path, tmp_path / "killed")  # what a power cut would leave
    with pytest.raises(ModelMismatchError, match="differ from those of first, the first device"):
        join(hub.address, Held("b"), name="second", timeout_s=PATIENCE_S)
    with Hub(
        {"w": np.zeros(6)}, run=tmp_path / "killed", bind="tcp://127.0.0.1:*", policy=POLICY, settings=FLOAT32
    ) as resumed:
        with pytest.raises(ModelMismatchError, match="differ from those of first, the first device"):
            join(resumed.address, Held("b"), name="second", timeout_s=PATIENCE_S)
        with join(resumed.address, Held("a"), name="third", timeout_s=PATIENCE_S) as session:
            assert session.connected
