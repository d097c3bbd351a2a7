"""No `chdir` moves a path: each is absolute from the call on, or from the moment that a settings file is read."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import edgeasync
from edgeasync import Agent, Hub, Peer, Run, async_train, callbacks, data, join
from edgeasync.async_train import AsyncModelAverager, AsyncWorker, FaultTolerantTrainer, ParameterServer, nn
from edgeasync.callbacks import CSVLog, SaveBest
from edgeasync.config import convert, to_table, whole_address, whole_path
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import read_peers
from edgeasync.errors import ConfigError
from edgeasync.losses import OnnxLoss
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.sdk.joined_loop import JoinedLoop
from edgeasync.training.numpy_models import SoftmaxModel

MARK = "marked"
HUB = "tcp://127.0.0.1:9"
IPC = f"ipc://{MARK}/socket"
NUMBERS = {"w": np.zeros(2, np.float32)}
DATA = np.eye(4), np.arange(4) % 2
SOFTMAX = SoftmaxModel(inputs=4, classes=2)


class Step:
    """A model that steps, as `FaultTolerantTrainer` and `AsyncModelAverager` take it."""

    parameters = NUMBERS

    def gradient(self, arrays, x, y):
        return 0.0, {"w": arrays["w"]}


def at(name):
    return f"{MARK}/{name}"


def joined(**arguments):
    """Return a session of `join` that has not begun."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeasync.sdk.user_loop.UserLoop.start", lambda self: made.append(self) or self)
        join(model=NUMBERS, name="pi", **arguments)
    return made[0]


KEPT = {
    "Hub": lambda: Hub(at("model.onnx"), run=at("run"), keys=at("keys"), evaluate=at("data.npz")),
    "Hub, ipc": lambda: Hub(NUMBERS, run=at("run"), bind=IPC),
    "Agent": lambda: Agent(HUB, at("data.npz"), state=at("state"), validation=Path(at("held.csv"))),
    "Agent, ipc": lambda: Agent(IPC, DATA),
    "Agent, ipc of several": lambda: Agent([HUB, IPC], DATA),
    "Agent, several": lambda: Agent(HUB, [at("0.npz"), Path(at("1.npz"))], state=Path(at("state"))),
    "Peer": lambda: Peer(
        at("data.npz"),
        SOFTMAX,
        peers=at("peers.toml"),
        state=Path(at("state")),
        bind=IPC,
    ),
    "Peer, ipc": lambda: Peer(DATA, SOFTMAX, hub=IPC, address="tcp://10.0.0.1:5600", state=at("state")),
    "join": lambda: joined(hub=HUB, state=at("state")),
    "join, ipc": lambda: joined(hub=IPC),
    "join, peers": lambda: joined(state=at("state"), topology="ring", peers=Path(at("peers.toml"))),
    "OnnxLoss": lambda: OnnxLoss(file=at("loss.onnx")),
    "CSVLog": lambda: CSVLog(at("log.csv")),
    "SaveBest": lambda: SaveBest(at("best.npz")),
    "FaultTolerantTrainer": lambda: FaultTolerantTrainer(Step(), at("checkpoints")),
    "ParameterServer": lambda: ParameterServer(
        SoftmaxModel(inputs=4, classes=2), checkpoint_dir=at("run"), keys=at("keys")
    ),
    "AsyncWorker": lambda: AsyncWorker(HUB, state=at("state"), validation=at("held.npz")),
    "AsyncWorker, ipc": lambda: AsyncWorker(IPC),
    "AsyncModelAverager": lambda: AsyncModelAverager(
        nn.Linear(4, 2), checkpoint_dir=at("run"), keys=at("keys"), agent={"state": at("state")}
    ),
}
"""Objects that are made now and use their paths later."""

AT_THE_CALL = {
    "train", "train_async", "fetch_status", "load", "save", "OnnxTrainer", "Run", "Run.open", "Run.export",
}  # fmt: skip
"""These are done with their paths when they return, or keep them as `Run.path`."""


ADDRESSES = {"hub", "bind", "address", "server_address", "hub_address", "server"}
"""What arguments are called that may be `ipc://PATH`."""


def paths_in(value, seen):
    """Yield the path of every text and path in an object that has the mark, `ipc://PATH` included."""
    if id(value) in seen or inspect.ismodule(value) or inspect.isclass(value):
        return
    seen[id(value)] = value
    if isinstance(value, str | Path):
        if MARK in str(value):
            yield Path(str(value).removeprefix("ipc://"))
        return
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, list | tuple | set):
        parts = [*value]
    else:
        names = [*getattr(value, "__struct_fields__", ()), *getattr(value, "__dict__", ())]
        parts = [getattr(value, name, None) for name in names]
        parts += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    for part in parts:
        yield from paths_in(part, seen)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_made_keeps_absolute_paths(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = [*paths_in(KEPT[name](), {})]
    assert found
    assert [str(path) for path in found if not path.is_relative_to(tmp_path)] == []


def test_every_public_argument_that_is_a_path_is_looked_at():
    public = {
        name: getattr(module, name)
        for module in (edgeasync, callbacks, async_train, data, edgeasync.nn)
        for name in getattr(module, "__all__", dir(module))
        if not name.startswith("_")
    }
    public |= {"Run.open": Run.open, "Run.export": Run.export}
    with_paths, with_addresses = set(), set()
    for name, value in public.items():
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        if any("Path" in str(parameter.annotation) for parameter in parameters):
            with_paths.add(name)
        if ADDRESSES.intersection(parameter.name for parameter in parameters):
            with_addresses.add(name)
    assert with_paths - AT_THE_CALL <= {name.partition(",")[0] for name in KEPT}
    assert len(with_paths) > 8
    assert with_addresses - AT_THE_CALL == {name.partition(",")[0] for name in KEPT if ", ipc" in name}


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        (
            HubSettings,
            {
                "model": {"kind": "onnx", "file": at("m.onnx"), "loss": {"kind": "onnx", "file": at("l.onnx")}},
                "hub": {"run": at("run"), "keys": at("keys"), "bind": IPC},
                "evaluation": {"data": at("held.npz")},
            },
        ),
        (
            AgentSettings,
            {
                "agent": {
                    "data": at("data.npz"),
                    "state": at("state"),
                    "base_cache": at("bases"),
                    "hub": [HUB, IPC],
                },
            },
        ),
        (
            PeerSettings,
            {
                "peer": {
                    "data": at("data.npz"),
                    "state": at("state"),
                    "peers": at("peers.toml"),
                    "out": at("out.onnx"),
                    "bind": IPC,
                },
                "model": {"kind": "onnx", "file": at("m.onnx")},
            },
        ),
    ],
)
def test_settings_that_are_read_have_absolute_paths(tmp_path, monkeypatch, settings, table):
    monkeypatch.chdir(tmp_path)
    read = convert(table, settings, where="test")
    monkeypatch.chdir("/")
    found = [*paths_in(read, {})]
    assert len(found) == str(table).count(MARK)
    assert all(path.is_relative_to(tmp_path) for path in found)
    assert convert(to_table(read), settings, where="again") == read, "and are written as such"


def test_the_file_of_peers_names_sockets_from_its_own_folder(tmp_path, monkeypatch):
    """It is read again while the agent runs, from wherever that is by then."""
    keys = [KeyPair.make().public.hex() for _ in range(3)]
    places = ["ipc://one", f"ipc://{tmp_path}/two", "ipc://@three"]
    entries = [
        f'{{name = "pi-{number}", address = "{place}", key = "{key}"}}'
        for number, (place, key) in enumerate(zip(places, keys, strict=True))
    ]
    (tmp_path / "peers.toml").write_text(f"peer = [{', '.join(entries)}]")
    monkeypatch.chdir("/")
    found = [entry.address for entry in read_peers(tmp_path / "peers.toml").peer]
    assert found == [f"ipc://{tmp_path}/one", f"ipc://{tmp_path}/two", "ipc://@three"]


@pytest.mark.parametrize("address", [HUB, "ipc://@name", "ipc://*", "inproc://name", "ipc://", "nonsense"])
def test_other_addresses_stay_as_they_are(address):
    assert whole_address(address) == address


def test_a_home_that_is_not_there_is_told_with_its_key():
    with pytest.raises(ConfigError, match=r"test: agent.state: .*unknown home folder"):
        convert({"agent": {"state": "~nobody-here/x"}}, AgentSettings, where="test")


def test_what_is_no_path_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in (DATA, None, NUMBERS, [DATA, DATA]):
        assert whole_path(given) is given or whole_path(given) == given
    assert whole_path(["a", Path("b")]) == [tmp_path / "a", tmp_path / "b"]


# -- at work ---------------------------------------------------------------------------------------------------


def test_a_hub_at_a_relative_socket_is_found_after_a_change_of_folder(tmp_path, monkeypatch):
    """Red before: hub and agent resolved the path at each bind and connect."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    monkeypatch.chdir(first)
    hub = Hub(SoftmaxModel(inputs=4, classes=2), run="run", bind="ipc://socket")
    agent = Agent("ipc://socket", DATA)
    monkeypatch.chdir(other)
    with hub, agent:
        agent.wait_until_joined(20.0)
        assert hub.address == f"ipc://{first}/socket"
    assert [*other.iterdir()] == []


def test_a_joined_loop_resumes_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    steps = []
    with Hub(NUMBERS, run="run", bind="tcp://127.0.0.1:*") as hub:
        for _ in range(2):
            monkeypatch.chdir(tmp_path)
            model = {"w": np.zeros(2, np.float32)}
            with join(hub.address, model, name="loop", state="loop") as session:
                assert isinstance(session, JoinedLoop)
                monkeypatch.chdir(tmp_path / "other")
                steps.append(session.steps)
                for _ in range(20):
                    session.step()
    assert steps == [0, 20]
    assert [*(tmp_path / "other").iterdir()] == []
