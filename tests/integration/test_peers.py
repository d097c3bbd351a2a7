"""Peers without a hub, as real processes: they agree on the mean, and nobody waits for one that is killed."""

import asyncio
import signal
import threading

import numpy as np
import pytest

from edgeasync import StepResult
from edgeasync.errors import StorageError
from edgeasync.graphs.model_file import load_model
from edgeasync.runtime import model_keeper
from edgeasync.runtime.peer import PEER_MODEL_FILE
from edgeasync.runtime.peer_device import write_trained
from tests.support.programs.peers import FILE, SPEC, Still, first_values, make_peer, name_of, write_list
from tests.support.programs.processes import PATIENCE_S
from tests.support.size import repetitions

pytestmark = pytest.mark.process

TOPOLOGIES = ["ring", "all_to_all"]
PEERS = ("-m", "tests.support.programs.peers")


@pytest.fixture
def start_peers(commands, tmp_path):
    """Start peers of a list that is written already."""

    def start(numbers, topology, lease_s=3.0):
        return [commands.start(tmp_path, number, topology, lease_s, program=PEERS) for number in numbers]

    return start


def wait_for_round_of(peers, numbers):
    """Wait until each has the mean of a round of just these members that ends from now on."""
    members = ", ".join(name_of(number) for number in numbers)
    begun = [(peer, len(peer.events)) for peer in peers]
    for peer, since in begun:
        peer.wait_for("round_done", since=since, members=members)


def end(peers):
    for peer in peers:
        peer.signal(signal.SIGTERM)
    assert [peer.wait() for peer in peers] == [0] * len(peers)


def models(folder, numbers):
    return np.stack([load_model(folder / name_of(number) / PEER_MODEL_FILE, SPEC)[0] for number in numbers])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_without_training_all_have_the_mean(start_peers, tmp_path, topology):
    """Whatever whole rounds of a few there were before: each keeps the sum of all models."""
    numbers = range(repetitions("peers that average"))
    write_list(tmp_path, numbers)
    peers = start_peers(numbers, topology)
    wait_for_round_of(peers, numbers)
    end(peers)
    found = models(tmp_path, numbers)
    assert np.ptp(found, axis=0).max() < 1e-6
    mean = np.mean([first_values(number) for number in numbers], axis=0, dtype=np.float64)
    # A round that one gave up and another took as whole does not keep the sum (decision 0045).
    whole = not any(event["event"] == "round_abandoned" for peer in peers for event in peer.events)
    assert not whole or np.abs(found - mean).max() < 1e-6


def test_who_is_added_to_the_file_joins_and_who_is_taken_out_is_left_alone(start_peers, tmp_path):
    write_list(tmp_path, [0, 1])
    peers = start_peers([0, 1], "ring")
    wait_for_round_of(peers, [0, 1])
    write_list(tmp_path, [0, 1, 2])
    peers += start_peers([2], "ring")
    wait_for_round_of(peers, [0, 1, 2])
    write_list(tmp_path, [1, 2])
    wait_for_round_of(peers[1:], [1, 2])
    peers[0].wait_for("warning")
    peers[0].wait_for("alone", count=2)
    end(peers)


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["trainer", "callback"])
async def test_a_peer_that_fails_says_goodbye(tmp_path, by):
    """The lease is far longer than the test: nobody has to wait for it."""
    write_list(tmp_path, [0, 1])
    found, lost, fails = asyncio.Event(), asyncio.Event(), threading.Event()

    class Fails(Still):
        def step(self):
            if by == "trainer" and fails.is_set():
                raise ZeroDivisionError("on purpose")
            return super().step()

    def fail(report):
        if by == "callback" and report.event == "round_done" and fails.is_set():
            raise ZeroDivisionError("on purpose")

    def tell(report):
        {"peer_found": found, "peer_lost": lost}.get(report.event, asyncio.Event()).set()

    one = make_peer(tmp_path, 0, lease_s=600.0, incarnation=1, on_report=tell)
    other = make_peer(tmp_path, 1, lease_s=600.0, incarnation=1, trainer=Fails(), on_report=fail)
    running = [asyncio.create_task(peer.run()) for peer in (one, other)]
    async with asyncio.timeout(PATIENCE_S):
        await found.wait()
        fails.set()
        with pytest.raises(ZeroDivisionError):
            await running[1]
        await lost.wait()
        one.request_stop()
        assert await running[0] == "stopped"


@pytest.mark.asyncio
async def test_what_a_peer_says_of_its_disk_is_said_on_its_loop(tmp_path):
    write_list(tmp_path, [0, 1])
    told = []
    peer = make_peer(
        tmp_path, 0, incarnation=1, on_report=lambda report: told.append((report, threading.current_thread()))
    )
    peer._keeper._file = tmp_path / FILE / "no folder"
    running = asyncio.create_task(peer.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        peer.request_stop()
        assert await running == "stopped"
    assert "cannot be written" in told[-1][0].detail
    assert {thread for _, thread in told} == {threading.current_thread()}


@pytest.mark.asyncio
async def test_a_trainer_with_values_of_its_own_takes_the_mean_before_its_next_step(tmp_path):
    """It writes its own values into the model at each step: a mean that it has not seen would be lost."""
    write_list(tmp_path, [0, 1])

    class Copies(Still):
        def begin(self, parameters):
            super().begin(parameters)
            self.own = parameters.copy()

        def step(self):
            found = super().step()
            self.parameters[:] = self.own
            return found

    peers = [make_peer(tmp_path, number, incarnation=1, trainer=Copies(), rounds_max=3) for number in (0, 1)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*[peer.run() for peer in peers])
    mean = (first_values(0) + first_values(1)) / 2
    assert max(np.abs(peer.parameters - mean).max() for peer in peers) < 1e-6


@pytest.mark.asyncio
async def test_who_is_left_alone_at_the_end_still_takes_the_last_mean(tmp_path):
    """The others leave as soon as it has their bytes; it may not have decoded them yet."""
    write_list(tmp_path, [0, 1])
    has_met, alone, other_trained = threading.Event(), threading.Event(), threading.Event()

    def tell(report):
        if report.event == "peer_found":
            has_met.set()
        if report.event == "alone" and has_met.is_set():
            alone.set()

    class StepsLast(Still):
        def step(self):  # its last: a round that began before the other's last step would not be the last one
            other_trained.wait(PATIENCE_S)
            return super().step()

    how = {"topology": "all_to_all", "incarnation": 1, "meets": True, "steps_max": 1, "round_steps": 1000}
    slow = make_peer(tmp_path, 0, **how, on_report=tell, trainer=StepsLast())
    other = make_peer(tmp_path, 1, **how)
    aside, coded, wait_for_last_round = slow.aside, [], other._wait_for_last_round

    def trained():
        other_trained.set()
        wait_for_last_round()

    other._wait_for_last_round = trained

    def decode_late(work, then):
        coded.append(work)
        if len(coded) > 1:  # the first is its own model, which the other needs
            aside(lambda: (alone.wait(PATIENCE_S), work())[1], then)
        else:
            aside(work, then)

    slow.aside = decode_late
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(slow.run(), other.run())
    assert np.ptp(models(tmp_path, [0, 1]), axis=0).max() < 1e-6


@pytest.mark.asyncio
async def test_a_peer_that_ends_while_it_decodes_keeps_its_model(tmp_path):
    """Nothing but the training thread writes to the model."""
    write_list(tmp_path, [0, 1])
    decodes, decoded = asyncio.Event(), threading.Event()
    peer = make_peer(tmp_path, 0, incarnation=1)
    running = asyncio.create_task(peer.run())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    peer.aside(lambda: (loop.call_soon_threadsafe(decodes.set), decoded.wait(PATIENCE_S)), lambda _: None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await decodes.wait()
            peer.request_stop()
            await running
        assert (models(tmp_path, [0])[0] == first_values(0)).all()
    finally:
        decoded.set()


@pytest.mark.asyncio
async def test_a_peer_that_abandons_a_step_keeps_those_before(tmp_path, monkeypatch):
    """What the abandoned step has written by then, or writes later, is no part of it."""
    monkeypatch.setattr(model_keeper, "COPY_S", 0.0)
    write_list(tmp_path, [0, 1])
    hangs, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Hangs(Still):
        steps = 0

        def step(self):
            self.parameters += 1.0
            self.steps += 1
            if self.steps == 3:
                loop.call_soon_threadsafe(hangs.set)
                goes_on.wait(PATIENCE_S)
            return StepResult(loss=1.0, examples=1)

    peer = make_peer(tmp_path, 0, incarnation=1, trainer=Hangs())
    running = asyncio.create_task(peer.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await hangs.wait()
            peer.request_stop()
            await running
        kept, steps = load_model(tmp_path / name_of(0) / PEER_MODEL_FILE, SPEC)
        assert (steps, peer.steps_total) == (2, 2)
        assert np.allclose(kept, first_values(0) + 2.0)
        assert (peer.parameters == kept).all(), "--out writes the same"
    finally:
        goes_on.set()


@pytest.mark.asyncio
async def test_a_peer_whose_disk_hangs_ends_and_says_that_its_model_is_not_written(tmp_path, monkeypatch):
    write_list(tmp_path, [0, 1])
    told, written = [], threading.Event()
    monkeypatch.setattr(model_keeper, "WRITE_S", 0.1)
    monkeypatch.setattr(model_keeper, "save_model", lambda *_, **__: written.wait(PATIENCE_S))
    peer = make_peer(tmp_path, 0, incarnation=1, on_report=told.append)
    running = asyncio.create_task(peer.run())
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            peer.request_stop()
            assert await running == "stopped"
        assert "not written within 0.1 s" in told[-1].detail
    finally:
        written.set()


@pytest.mark.asyncio
async def test_a_peer_whose_training_diverges_says_so_once_and_no_file_is_replaced_by_its_model(
    tmp_path, monkeypatch
):
    class Diverging(Still):
        def step(self):
            self.parameters += np.nan
            return super().step()

    monkeypatch.setattr(model_keeper, "COPY_S", 0.0)
    monkeypatch.setattr(model_keeper, "KEEP_MODEL_S", 0.0)
    write_list(tmp_path, [1, 2])
    reports = []
    peer = make_peer(
        tmp_path, 1, lease_s=0.2, incarnation=1, trainer=Diverging(), steps_max=5, on_report=reports.append
    )
    await peer.run()
    warnings = [report.detail for report in reports if report.event == "warning"]
    assert len(warnings) == 1
    assert "training has diverged" in warnings[0]
    assert peer.diverged
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"an earlier model")
    with pytest.raises(StorageError, match="training has diverged"):
        write_trained(out, peer, None)
    assert out.read_bytes() == b"an earlier model"


@pytest.mark.asyncio
async def test_a_step_that_diverges_is_undone_and_the_model_on_disk_is_finite(tmp_path, monkeypatch):
    """Each third step leaves values that are not finite."""

    class Diverging(Still):
        begun = steps = resets = 0

        def begin(self, parameters):
            self.parameters = parameters
            self.begun += 1

        def step(self):
            self.steps += 1
            self.parameters += np.float32(np.nan if self.steps % 3 == 0 else 1.0)
            return super().step()

        def reset(self):
            self.resets += 1

    monkeypatch.setattr(model_keeper, "COPY_S", 0.0)
    write_list(tmp_path, [1, 2])
    reports, trainer = [], Diverging()
    peer = make_peer(
        tmp_path, 1, lease_s=0.2, incarnation=1, trainer=trainer, steps_max=9, on_report=reports.append
    )
    begun_with = peer.parameters.copy()
    await peer.run()
    assert (trainer.begun, trainer.resets) == (3, 2)  # the last step is undone at the end
    assert not peer.diverged
    assert np.allclose(peer.parameters, begun_with + 6.0)
    kept, steps = load_model(tmp_path / name_of(1) / PEER_MODEL_FILE, SPEC)
    assert (kept == peer.parameters).all()
    assert steps == peer.steps_total == 8
    warnings = [report.detail for report in reports if report.event == "warning"]
    assert warnings == [
        "training has diverged: values of the model are not finite: restored the model of step 2",
    ]


@pytest.mark.asyncio
async def test_the_model_to_return_to_is_on_disk_as_soon_as_it_is_needed(tmp_path, monkeypatch):
    at_hand = []

    class Diverging(Still):
        steps = 0

        def step(self):
            self.steps += 1
            self.parameters += np.float32(np.nan if self.steps == 3 else 1.0)
            if self.steps == 20:
                at_hand.append(load_model(tmp_path / name_of(1) / PEER_MODEL_FILE, SPEC)[1])
            return super().step()

    monkeypatch.setattr(model_keeper, "COPY_S", 0.0)
    write_list(tmp_path, [1, 2])
    await make_peer(tmp_path, 1, lease_s=0.2, incarnation=1, trainer=Diverging(), steps_max=25).run()
    assert at_hand == [2]
