"""A parameter server, its workers, and averagers, by real sockets; their programs: test_reference_programs.py."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edgeasync import Agent, Hub, Run
from edgeasync.async_train import (
    AsyncModelAverager,
    AsyncWorker,
    ParameterServer,
    communication,
    init_distributed,
    nn,
    optim,
    parameter_server,
)
from edgeasync.callbacks import JoinEvent
from edgeasync.errors import ConfigError
from edgeasync.sdk.joined_loop import JoinedLoop
from tests.support.programs.journals import pushes_in
from tests.support.programs.processes import free_address, until


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def test_a_server_resumes_from_its_folder(tmp_path):
    x, y, model = np.eye(4), np.arange(4) % 2, nn.Sequential(nn.Linear(4, 2))
    for start in range(2):
        with ParameterServer(model, port=0, checkpoint_dir=tmp_path, staleness_policy="filter") as server:
            assert server.hub.status()["version"] == 3 * start
            how = {"epochs": 3, "optimizer": optim.SGD(lr=0.1)}
            worker = AsyncWorker(server.hub.address, 4)
            worker.train((x, y), **how) if start else asyncio.run(worker.train_async((x, y), **how))
    np.testing.assert_array_equal(Run.open(tmp_path).arrays["0.weight"], model.state_dict()["0.weight"])


def test_a_worker_uses_an_answer_after_its_delay(tmp_path):
    x, y = np.eye(4).repeat(20, 0), (np.arange(4) % 2).repeat(20)
    with ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0, checkpoint_dir=tmp_path) as server:
        worker = AsyncWorker(server.hub.address, 4, update_frequency=6, delay=3)
        worker.train((x, y), epochs=4, optimizer=optim.SGD(lr=0.1))
    found = [(push.local_steps, push.overlap_steps) for push in pushes_in(tmp_path)]
    assert found == [(6, 0)] + [(6, 3)] * 12 + [(2, 2)], "of 80 steps the last two as well"


def test_an_averager_uses_an_average_after_its_delay():
    x, y, versions = np.eye(4, dtype=np.float32), np.arange(4) % 2, []
    model = nn.Sequential(nn.Linear(4, 2))
    with AsyncModelAverager(model, master="127.0.0.1:*", averaging_frequency=5, delay=2) as averager:
        for _ in range(24):
            averager.train_step(x, y, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
            versions.append(averager.communication.session.version)
    assert versions == [0] * 6 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 3, "sent at 5, used at 7"


def test_a_delay_over_the_steps_of_an_update_is_refused():
    sentence = r"delay is 6, but must be from 0 to 5 \(update_frequency\): .* only one unanswered update"
    with pytest.raises(ConfigError, match=sentence):
        AsyncWorker("127.0.0.1:5000", update_frequency=5, delay=6)
    with pytest.raises(ConfigError, match="delay_steps does not work with epochs: use local_steps_max"):
        Agent("tcp://127.0.0.1:5000", (np.eye(4), np.arange(4)), epochs=1, delay_steps=6)


class Custom:
    """A model of the user's own."""

    def __init__(self):
        self.parameters = {"w": np.zeros((4, 2), np.float32)}

    def gradient(self, arrays, x, y):
        scores = x @ arrays["w"]
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        shares[np.arange(len(y)), y] -= 1.0
        return float(np.square(shares).sum()), {"w": x.T @ shares / len(y)}

    def predict(self, arrays, x):
        return (x @ arrays["w"]).argmax(1)


def test_models_of_the_users_own_go_everywhere(tmp_path):
    x, y, model = np.eye(4, dtype=np.float32), np.arange(4) % 2, Custom()
    with ParameterServer(model, port=0) as server:
        worker = AsyncWorker(server.hub.address, 4, model=Custom())
        worker.train((x, y), epochs=30, optimizer=optim.SGD(lr=1.0))
        assert worker.evaluate((x, y)) == 1.0
    assert (model.predict(model.parameters, x) == y).all()
    path = tmp_path / "model.onnx"
    path.write_bytes(nn.Model(nn.Linear(4, 2)).SerializeToString())
    for given in (Custom(), path):
        with AsyncModelAverager(given, master="127.0.0.1:*", averaging_frequency=4) as averager:
            for _ in range(30):
                averager.train_step(x, y, optimizer=optim.SGD(lr=1.0), loss_fn=nn.CrossEntropyLoss())
            assert averager.evaluate([(x, y)]) == 1.0


def test_between_abort_and_resume_an_averager_exchanges_nothing():
    x, y = np.eye(4, dtype=np.float32), np.arange(4) % 2
    with AsyncModelAverager(
        nn.Sequential(nn.Linear(4, 2)), master="127.0.0.1:*", averaging_frequency=4
    ) as averager:
        session = averager.communication.session

        def exchanges(steps):
            for _ in range(steps):
                averager.train_step(x, y, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
            return session.exchanges

        before = exchanges(20)
        averager.abort()
        assert exchanges(20) == before > 1
        averager.resume()
        until(lambda: exchanges(4) > before, "an exchange")


def test_rank_0_is_killed_and_the_others_wait_for_its_return(commands, tmp_path):
    port = free_address().rpartition(":")[2]

    def start(rank):
        said = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        under = ["env", *(f"{name}={value}" for name, value in said.items())]
        return commands.start(
            tmp_path / "run", program=("-m", "tests.support.programs.averaging_rank"), under=under
        )

    first, *others = [start(rank) for rank in range(3)]
    for rank in (first, *others):
        rank.wait_for("averaged", count=5)
    first.kill()
    seen = [len(rank.events) for rank in others]
    for rank, since in zip(others, seen, strict=True):
        rank.wait_for("trained", count=3, since=since)  # by itself
    last = max(event["version"] for rank in others for event in rank.events if event["event"] == "averaged")
    again = start(0)
    began = again.wait_for("averaged")["version"]
    assert began >= last, "no average that anybody has is lost"
    for rank in (again, *others):
        rank.wait_for("averaged", version=began + 5)


def test_what_is_ignored_is_said_once_and_what_nobody_knows_is_a_mistake(caplog, monkeypatch):
    for _ in range(2):
        AsyncModelAverager(network(), communication_backend="gloo")
        init_distributed(backend="gloo", rank=1, world_size=4)
    told = [record.getMessage() for record in caplog.records]
    assert all(told.count(line) == 1 for line in told)
    assert not {line for line in told if "is ignored" not in line}
    with pytest.raises(TypeError, match="averaging_frequence"):
        AsyncModelAverager(network(), averaging_frequence=3)
    with pytest.raises(TypeError, match="epoch'"):
        AsyncWorker("127.0.0.1:9").train((np.eye(4), [0, 1, 0, 1]), epoch=3)
    with pytest.raises(TypeError, match="stale"):
        ParameterServer(network(), stale=3)
    with pytest.raises(ConfigError, match="staleness_policy is 'none'; choose 'adaptive_lr' or 'filter'"):
        ParameterServer(network(), staleness_policy="none")
    with pytest.raises(ConfigError, match="dataset or dataloader"):
        AsyncWorker("127.0.0.1:9").train()
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="rank is 4, but world_size is 4"):
        init_distributed()


def test_a_worker_refuses_another_loss_than_the_servers():
    with ParameterServer(network(), port=0, loss_fn=nn.MSELoss()) as server:
        worker = AsyncWorker(server.hub.address)
        with pytest.raises(ConfigError, match="the loss mse, but this device uses cross_entropy"):
            worker.train((np.zeros((4, 64)), np.zeros((4, 10))), loss_fn=nn.CrossEntropyLoss())


def hubs():
    return [thread for thread in threading.enumerate() if thread.name == "edgeasync-hub"]


@pytest.mark.parametrize(
    ("of", "name"), [(communication, "join"), (Hub, "wait_for"), (JoinedLoop, "_send_last_steps")]
)
def test_an_averager_that_cannot_begin_or_end_leaves_no_hub(monkeypatch, of, name):
    def fails(*_, **__):
        raise RuntimeError("no session")

    averager = AsyncModelAverager(network(), master="127.0.0.1:*")
    monkeypatch.setattr(of, name, fails)
    with pytest.raises(RuntimeError, match="no session"), averager:
        pass
    assert not hubs()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["server", "averager"])
async def test_a_start_that_is_cancelled_leaves_nothing_running(kind):
    server, averager = ParameterServer(network(), port=0), AsyncModelAverager(network(), master="127.0.0.1:*")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), server if kind == "server" else averager:
            pass
    hub = server.hub if kind == "server" else averager.communication.hub
    assert hub.wait(0)


def test_workers_that_have_gone_already_are_not_waited_for():
    x, y = np.eye(4, dtype=np.float32), np.arange(4) % 2
    with ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0) as server:
        worker = AsyncWorker(server_address=server.hub.address)
        worker.train((x, y), epochs=1, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
        assert worker.evaluate((x, y)) >= 0.0
        server.wait_for_workers(timeout_s=30.0)
        with pytest.raises(TimeoutError, match="fewer than 2 workers have joined"):
            server.wait_for_workers(2, timeout_s=0.05)


def test_the_servers_model_has_the_trained_values_once_its_workers_have_left():
    x, y, model = np.eye(4, dtype=np.float32), np.arange(4) % 2, nn.Sequential(nn.Linear(4, 2))
    with ParameterServer(model=model, port=0) as server:
        AsyncWorker(server.hub.address, 4).train((x, y), epochs=3, optimizer=optim.SGD(lr=0.1))
        first = model.state_dict()
        server.wait_for_workers()
        newest = server.hub.snapshot()
        assert not np.array_equal(model.state_dict()["0.weight"], first["0.weight"])
        for name, array in model.state_dict().items():
            np.testing.assert_array_equal(array, newest[name])


def test_one_limit_is_for_coming_and_for_leaving(monkeypatch):
    now_s = iter([100.0, 103.0])
    with ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0) as server:
        server._comers.on_join(JoinEvent(time_s=0.0, device="pi"))
        monkeypatch.setattr(parameter_server, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
        limits = []

        def leave_late(timeout_s):
            limits.append(timeout_s)
            raise TimeoutError

        monkeypatch.setattr(server.hub, "wait_until_left", leave_late)
        with pytest.raises(TimeoutError, match="workers are still connected after 10 s"):
            server.wait_for_workers(timeout_s=10.0)
    assert limits == [7.0]
