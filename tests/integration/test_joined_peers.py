"""Loops of the user's own average their models without a hub, by real sockets: each loop has a thread here."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edgeasync import join
from edgeasync.async_train import AsyncModelAverager, nn, optim
from edgeasync.errors import AddressError, ConfigError
from edgeasync.sdk import user_loop
from edgeasync.sdk.lockstep import Lockstep
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import PATIENCE_S, until

TARGETS = (-1.0, 1.0, 3.0)
NUMBERS = range(len(TARGETS))
LEASE_S = 5.0


def how(folder, number, **settings):
    """Return the arguments of a loop among peers."""
    usual = {"topology": "ring", "lease_s": LEASE_S}
    return {"peers": folder / FILE, "name": name_of(number), "state": folder / name_of(number)} | usual | settings


def together(live, folder, numbers=NUMBERS):
    """Let each loop live in a thread; return what they return.

    The second argument takes steps that leave the model as it is, until all have called it.
    """
    write_list(folder, numbers)
    waiting = set()

    def rest(session):
        waiting.add(session)
        until_s = time.monotonic() + PATIENCE_S
        while len(waiting) < len(numbers) and time.monotonic() < until_s:
            session.step()
            time.sleep(0.001)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [life.result() for life in [pool.submit(live, number, rest) for number in numbers]]


def take_steps(model, session, number, count):
    for _ in range(count):
        model["w"] += 0.1 * (TARGETS[number] - model["w"])
        session.step(loss=float(np.square(model["w"] - TARGETS[number]).mean()), examples=3)


def test_a_loop_is_connected_while_another_is_there(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(user_loop, "LOOK_EVERY_S", 0.02)

    def live(number, rest):
        model = {"w": np.zeros(6, np.float32)}
        with join(model=model, **how(tmp_path, number)) as session:
            rest(session)
            while not session.connected:
                session.step()
        return session.connected

    assert together(live, tmp_path) == [False] * len(NUMBERS)
    write_list(tmp_path / "alone", [0, 1])
    with join(model={"w": np.zeros(6, np.float32)}, **how(tmp_path / "alone", 0, lease_s=0.5)) as session:
        until(lambda: "training alone" in caplog.text, "a warning")
        assert not session.connected


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
@pytest.mark.parametrize("rounds", [{"round_steps": 5}, {"round_every_s": 0.02}], ids=["steps", "time"])
def test_loops_agree_at_the_end(tmp_path, topology, rounds):
    """Each is pulled to a number of its own, and all end between these."""

    def live(number, rest):
        model = {"w": np.full(6, number, np.float32), "b": np.full(1, number, np.float32)}
        with join(model=model, **how(tmp_path, number, topology=topology, **rounds)) as session:
            if "round_steps" in rounds:
                take_steps(model, session, number, 100)
            else:
                while session.exchanges < 20:
                    take_steps(model, session, number, 1)
                    time.sleep(0.001)
            assert session.version == session.exchanges
            rest(session)
        assert session.finished
        return model, session.exchanges

    models, exchanges = zip(*together(live, tmp_path), strict=True)
    for model in models:
        assert np.allclose(model["w"], models[0]["w"], rtol=0.0, atol=1e-6)
        assert (np.abs(model["w"] - 1.0) < 1.9).all(), "nobody's own number: all pull"
        assert np.allclose(model["b"], models[0]["b"], rtol=0.0, atol=1e-6)
    assert min(exchanges) > 5


def test_modules_of_torch_agree_with_their_statistics(tmp_path):
    torch = pytest.importorskip("torch")

    def live(number, rest):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(24, 3, generator=generator)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(module.parameters())
        with join(model=module, optimizer=optimizer, **how(tmp_path, number, round_steps=5)) as session:
            for batch in session.batches(x.split(6) * 10):
                optimizer.zero_grad()
                module(batch).square().mean().backward()
                optimizer.step()
            assert session.steps == 40
            rest(session)
        return {name: tensor.numpy() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}

    first, *others = together(live, tmp_path)
    assert any("running_mean" in name for name in first)
    assert all(np.allclose(first[name], other[name], rtol=0.0, atol=1e-6) for other in others for name in first)


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_that_ends_early_stops_nobody(tmp_path, fails):
    """Nobody has to wait a lease for one that leaves, even if it leaves by a mistake."""
    satisfied = set()

    def live(number, _):
        model = {"w": np.zeros(6, np.float32)}
        with join(model=model, **how(tmp_path, number, round_steps=5, lease_s=2 * LEASE_S)) as session:
            take_steps(model, session, number, 20)
            if number == 1:
                if fails:
                    raise ZeroDivisionError
                return session
            exchanges, began_s = session.exchanges, time.monotonic()
            while len(satisfied) < 2:  # who has enough does not leave the other alone
                take_steps(model, session, number, 1)
                assert time.monotonic() - began_s < 2 * LEASE_S
                if session.exchanges >= exchanges + 5:
                    satisfied.add(number)
        return session

    def live_or_fail(number, _):
        try:
            return live(number, _)
        except ZeroDivisionError:
            return None

    one, left, other = together(live_or_fail, tmp_path)
    assert (left is None) == fails
    assert one.finished
    assert other.finished


def test_a_loop_that_starts_again_has_its_model_and_its_steps(tmp_path):
    """Its only peer never comes: it trains alone."""
    write_list(tmp_path, [0, 1])
    for start in (1, 2):
        model = {"w": np.zeros(3, np.float32)}
        with join(model=model, **how(tmp_path, 0, lease_s=0.2)) as session:
            assert list(model["w"]) == [3.0 * (start - 1)] * 3
            for _ in range(3):
                model["w"] += 1.0
                session.step()
            assert session.evaluate(lambda: float(model["w"][0])) == 3.0 * start  # noqa: B023
        assert (session.steps, session.exchanges, session.version) == (3 * start, 0, None)
        assert list(model["w"]) == [3.0 * start] * 3


def test_a_start_that_is_interrupted_leaves_no_session(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    write_list(tmp_path, [0, 1])
    model = {"w": np.zeros(3, np.float32)}
    with monkeypatch.context() as patch:
        patch.setattr(Lockstep, "await_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            join(model=model, **how(tmp_path, 0))
    with join(model=model, **how(tmp_path, 0, lease_s=0.2)) as session:  # its folder and its address are free
        assert not session.finished


def test_what_keeps_a_loop_from_listening_is_raised(tmp_path):
    write_list(tmp_path, [0, 1], address="tcp://192.0.2.1:56{number}1")
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        join(model={"w": np.zeros(3, np.float32)}, **how(tmp_path, 0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topology": "circle"}, "topology is 'circle'"),
        ({"topology": "star"}, "peers requires topology"),
        ({"peers": None}, "join without a hub needs the file"),
        ({"state": None}, "needs state"),
        ({"hub": "tcp://127.0.0.1:5555"}, "hub requires a hub"),
        ({"own_start": True}, "own_start requires a hub"),
        (
            {"steps_max": 3},
            "steps_max is an argument of edgeasync.Peer only",
        ),
        ({"threads": 2}, "threads is an argument of edgeasync.Peer only"),
        ({"round_step": 3}, "round_step"),
        ({"codec": "top_k(0.1)"}, "top_k"),
        ({"name": "stranger"}, 'add it to the list on every device: {name = "stranger"'),
    ],
)
def test_mistakes(tmp_path, arguments, said):
    write_list(tmp_path, [0, 1])
    with pytest.raises(ConfigError, match=said):
        join(model={"w": np.zeros(3, np.float32)}, **how(tmp_path, 0, **arguments))


def test_what_a_loop_without_a_hub_cannot_do(tmp_path):
    write_list(tmp_path, [0, 1])
    with join(model={"w": np.zeros(3, np.float32)}, **how(tmp_path, 0, lease_s=0.2)) as session:
        with pytest.raises(ConfigError, match="call join again"):
            session.abort()
        with pytest.raises(ConfigError, match="all models have the same weight"):
            session.note(score=1.0)


# -- the toolbox --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [{"averaging_frequency": 4}, {"averaging_policy": "time", "averaging_interval_s": 0.02}]
)
def test_averagers_agree_without_a_hub(tmp_path, policy):
    x, y = np.eye(4, dtype=np.float32), np.arange(4) % 2

    def live(number, rest):
        model, optimizer = nn.Sequential(nn.Linear(4, 2)), optim.SGD(lr=0.2, momentum=0.5)
        with AsyncModelAverager(
            model,
            len(NUMBERS),
            number,
            topology="all_to_all",
            peers=tmp_path / FILE,
            checkpoint_dir=tmp_path / name_of(number),
            agent={"name": name_of(number), "lease_s": LEASE_S},
            **policy,
        ) as averager:
            while averager.communication.session.exchanges < 10:
                averager.train_step(x[number:], y[number:], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
            with pytest.raises(ConfigError, match="call join again"):
                averager.abort()
            rest(averager.communication.session)
        return model.state_dict(), averager.evaluate([(x, y)])

    found = together(live, tmp_path)
    first = found[0][0]
    for arrays, accuracy in found:
        assert all(np.allclose(arrays[name], first[name], rtol=0.0, atol=1e-6) for name in first)
        assert accuracy == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"delay": 3}, "delay requires a hub"),
        ({"preempt": True}, "preempt requires a hub"),
        ({"averaging_policy": "adaptive"}, "'iterations' or 'time'"),
        ({"topology": "star"}, "peers requires topology"),
    ],
)
def test_mistakes_of_an_averager(arguments, said):
    with pytest.raises(ConfigError, match=said):
        AsyncModelAverager(nn.Linear(4, 2), **{"topology": "ring", "peers": "peers.toml", **arguments})
    with pytest.raises(TypeError, match="averaging_frequence"):
        AsyncModelAverager(nn.Linear(4, 2), topology="ring", averaging_frequence=3)
