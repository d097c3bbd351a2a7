"""A key that is revoked is silent within a second of the file's change, and what it has here ends."""

import os
import time

import numpy as np
import pytest
import safetensors.numpy
import zmq

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.effects import Assign, Expel, HubReport
from edgeasync.core.hub.events import HubReceived, PushArrived, Revoked
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.run_replay import RunReplay
from edgeasync.net.allow_list_reader import AllowListReader
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator, SynchronousAggregator
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Buffered,
    Fetch,
    Hello,
    ModelVersion,
    Piece,
    Ping,
    Pong,
    Push,
    Welcome,
)
from simulation.clock import VirtualClock
from tests.support.codecs.coded import flat
from tests.support.parts.hub_bench import HubBench
from tests.support.programs.command_line import ACCESS
from tests.support.programs.processes import free_address, until
from tests.support.security.keyed import ask, begin_push, client, denied, enrolled, is_welcome, start_hub
from tests.support.simulation.hubs import simulated_hub
from tests.support.size import repetitions

ALICE, BOB = b"a" * 32, b"b" * 32


# -- the core -----------------------------------------------------------------------------------------------------


def joined(hub, name, key, state=1, start=1):
    hub.give(HubReceived(key[:5], Hello(name, bytes((state,)) * 16, start), key=key))


def pushed(hub, name, key, seq=1):
    hub.give(PushArrived(key[:5], hub.make_push(name, seq), next(hub.handles), 1.0, key=key))


@pytest.fixture
def hub():
    """A hub that folds three updates together; Alice's two devices and Bob's one have sent one each, but one."""
    hub = HubBench(policy=Policy(aggregate=BufferedAggregator(count=3)))
    for name, key in (("alice", ALICE), ("alice/1", ALICE), ("bob", BOB)):
        joined(hub, name, key)
    return hub


def revoke(hub, key):
    hub.effects = hub.core.handle(Revoked(key), hub.now_s)
    return hub._account()


def test_sessions_and_updates_that_wait_end(hub):
    pushed(hub, "alice", ALICE)
    pushed(hub, "bob", BOB)
    assert hub.core.policy_engine.gathering.count == 2
    revoke(hub, ALICE)
    assert [effect.device_id for effect in hub.all_of(HubReport)] == ["alice", "alice/1"]
    assert [effect.owner[0] for effect in hub.all_of(Expel)] == ["alice", "alice/1"]
    assert hub.core.policy_engine.gathering.count == 1
    assert hub.core.updates_rejected == 1
    assert hub.core.members.live_count == 1
    pushed(hub, "alice", ALICE, seq=2)
    assert hub.refused == "unknown_session"
    pushed(hub, "bob", BOB, seq=2)
    assert hub.refused is None


def test_who_waited_for_a_version_is_answered_as_soon_as_it_is_made():
    hub = HubBench(policy=Policy(aggregate=SynchronousAggregator()))
    for name, key in (("alice", ALICE), ("bob", BOB)):
        joined(hub, name, key)
        hub.give(HubReceived(key[:5], Fetch(hub.sessions[name]), key=key))
    pushed(hub, "bob", BOB)
    assert hub.core.members.members["bob"].waiting
    revoke(hub, ALICE)
    assert hub.core.version == 1
    assert hub.core.next_deadline_s() <= hub.now_s
    hub.tick()
    assert [effect.peer for effect in hub.all_of(Assign)] == [BOB[:5]]


def test_a_key_that_has_nothing_here_any_more_changes_nothing(hub):
    assert revoke(hub, b"?" * 32) == []
    revoke(hub, ALICE)
    assert revoke(hub, ALICE) == []


def test_the_next_key_of_the_name_takes_the_place(hub):
    pushed(hub, "alice", ALICE)
    revoke(hub, ALICE)
    joined(hub, "alice", b"n" * 32, state=2)
    assert hub.refused is None
    assert hub.core.members.members["alice"].retired == [b"\1" * 16]


# -- the engine and its journal -----------------------------------------------------------------------------------

SPEC = flat(600_000)
"""Large enough that a fold waits for the worker."""


class Fleet:
    """A hub on a folder, in virtual time, and what its devices say under their keys."""

    def __init__(self, folder, aggregate):
        folder.mkdir()
        self.clock, self.sessions, self.answers = VirtualClock(), {}, {}
        self.hub = simulated_hub(self.clock, SPEC, Policy(aggregate=aggregate), seed=1, disk=FolderDisk(folder))
        for name in "abc":
            answers = self.answers[name] = []
            self.hub.connect(name.encode(), lambda header, _, to=answers: to.append(wire.decode(header)))
            self.say(name, Hello(name, name.encode() * 16, 1))
            self.run()
            self.sessions[name] = next(one.session for one in answers if isinstance(one, Welcome))

    def run(self):
        self.clock.run(lambda: False, self.clock.now_s + 0.1)

    def say(self, name, message, payload=None):
        """Say something; what the worker is to do waits for `run`."""
        sender = Sender(name.encode() * 32, name, "device")
        self.hub.engine.on_message(name.encode(), wire.encode(message), payload, self.clock.now_s, sender)

    def push(self, name, *, pieces=False):
        payload = np.full(SPEC.length, 1e-3 * ord(name), np.float32).tobytes()
        version = ModelVersion(self.hub.core.lineage, self.hub.core.version)
        push = Push(
            self.sessions[name], 1, version, 1, 8, 1.0, 0.1, 0.1, "identity", wire.checksum(payload), len(payload),
            transfer=int(pieces),
        )  # fmt: skip
        self.say(name, push, None if pieces else payload)
        if pieces:
            part = payload[: 1 << 16]
            self.say(name, Piece(1, 0, wire.checksum(part)), part)
        else:  # the worker measures it
            self.clock.run(lambda: self.hub.core.members.members[name].seq_last == 1, self.clock.now_s + 0.1)


@pytest.mark.parametrize(
    ("aggregate", "pieces", "counted"),
    [
        pytest.param(ImmediateAggregator(), True, 0, id="in pieces"),
        pytest.param(BufferedAggregator(count=2), False, 0, id="waiting for a flush"),
        pytest.param(ImmediateAggregator(), False, 1, id="in the line for a fold"),
    ],
)
def test_a_replay_of_a_revocation_gives_the_same_model(tmp_path, aggregate, pieces, counted):
    fleet = Fleet(tmp_path / "run", aggregate)
    fleet.push("a", pieces=pieces)
    hub = fleet.hub
    assert (len(hub.engine._intake.incoming), hub.core.policy_engine.gathering.count, hub.core.version) == (
        int(pieces), int(not pieces and not counted), counted,
    )  # fmt: skip
    assert not hub.model.any(), "the fold has not been computed"
    hub.engine.revoke(b"a" * 32, fleet.clock.now_s)
    assert fleet.answers["a"][-1].code == "not_allowed"
    assert len(hub.engine._intake.incoming) == hub.core.policy_engine.gathering.count == 0
    fleet.push("b")
    fleet.push("c")
    fleet.run()
    assert [report.event for _, report in hub.reports].count("revoked") == 1
    assert hub.core.updates_applied == 2 + counted, "what is in a version stays there"
    replay = RunReplay(tmp_path / "run")
    replay.tell(lambda _: True)
    found = replay.summary().model_xxh3
    replay.close()
    assert found == f"{wire.checksum(hub.model.tobytes()):016x}"


# -- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def access(keys):
    """Who may come in, with what it told."""
    gone, trouble = set(), []
    access = AllowListReader(keys, gone.update, trouble.append)
    access.gone, access.trouble = gone, trouble
    return access


def edit(keys, change):
    """Change the list where it lies, as some editors do; its time is another for certain."""
    text = change(keys.allow_list_file.read_text())
    keys.allow_list_file.write_text(text)
    stamp = keys.allow_list_file.stat().st_mtime_ns + 1_000_000
    os.utime(keys.allow_list_file, ns=(stamp, stamp))


def test_a_line_that_is_taken_out_or_marked_shuts_its_key_out(keys, access):
    one, two = enrolled(keys, "one"), enrolled(keys, "two")
    access.read()
    assert access.holds(one.public)
    edit(keys, lambda text: "".join(line for line in text.splitlines(True) if not line.startswith("one")))
    access.poll()
    assert access.gone == set(), "it may be half written"
    access.poll()
    assert access.gone == {one.public}
    os.link(keys.allow_list_file, keys.folder / "kept")  # so that its number is not used again
    keys.revoke("two")
    access.poll()
    assert access.gone == {one.public, two.public}, "a file that took its place is whole"
    assert not access.lets_in(one.public, "")
    assert access.denied == {"revoked": 1}


def test_a_half_written_list_revokes_nobody(keys, access):
    pair = enrolled(keys)
    access.read()
    whole = keys.allow_list_file.read_text()
    edit(keys, lambda text: "")
    access.poll()
    edit(keys, lambda text: whole + "\n")
    access.poll()
    access.poll()
    assert access.gone == set()
    assert access.holds(pair.public)


@pytest.mark.parametrize("change", [lambda text: text + "pi-9 device\n", lambda text: "\0" * 100])
def test_a_line_that_cannot_be_read_changes_nothing_and_is_told(keys, access, change):
    pair = enrolled(keys)
    access.read()
    edit(keys, change)
    for _ in range(4):
        access.poll()
    assert access.gone == set()
    assert access.holds(pair.public)
    assert len(access.trouble) == 1
    assert "line" in access.trouble[0]


def line_of(name, pair, role="device"):
    return f"{name} {role} {pair.public.hex()}\n"


def test_who_is_taken_out_is_out_though_another_line_cannot_be_read(keys, access):
    """Nobody new comes in meanwhile, and the name of that line stays as it was."""
    names = ("out", "marked", "stays", "unclear", "again")
    pairs = {name: enrolled(keys, name) for name in names}
    new, replaced = KeyPair.make(), KeyPair.make()
    access.read()
    listed = [
        line_of("owner", pairs["out"]).replace("device", "king"),
        line_of("marked", pairs["marked"], "revoked"),
        line_of("stays", pairs["stays"]),
        "unclear devic" + line_of("", pairs["unclear"]),
        line_of("again", replaced),
        line_of("new", new),
    ]
    edit(keys, lambda text: "".join(listed))
    access.poll()
    access.poll()
    assert access.gone == {pairs[name].public for name in ("out", "marked", "again")}
    assert all(access.holds(pairs[name].public) for name in ("stays", "unclear"))
    assert not access.holds(new.public)
    assert not access.holds(replaced.public)
    (told,) = access.trouble
    assert "line 1: unknown role" in told
    assert "line 4: expected NAME ROLE KEY" in told
    edit(keys, lambda text: "".join(listed[1:3] + listed[4:]))
    access.poll()
    access.poll()
    assert access.holds(new.public)
    assert access.holds(replaced.public)
    assert not access.holds(pairs["unclear"].public)


def test_a_key_that_is_marked_is_out_under_any_name(keys, access):
    pair = enrolled(keys, "one")
    access.read()
    edit(keys, lambda text: line_of("other", pair, "revoked") + "one device\n")
    access.poll()
    access.poll()
    assert pair.public in access.gone


@pytest.mark.parametrize("change", [("one ", "new "), ("device  ", "operator")], ids=["name", "role"])
def test_a_key_that_gets_another_name_or_role_loses_what_it_had(keys, access, change):
    one = enrolled(keys, "one")
    access.read()
    edit(keys, lambda text: text.replace(*change))
    access.poll()
    access.poll()
    assert access.gone == {one.public}
    assert access.lets_in(one.public, "")
    assert not access.gives(one.public, "one")
    assert access.gives(one.public, "new/1") == (change[1] == "new ")


def test_a_list_that_is_gone_changes_nothing_and_is_told(keys, access):
    keys.allow_list_file.rename(keys.folder / "elsewhere")
    for _ in range(4):
        access.poll()
    assert access.gone == set()
    assert len(access.trouble) == 1


class Timers:
    """A loop of which only the timers are used."""

    def call_later(self, delay_s, action, *arguments):
        self.run_next = lambda: action(*arguments)


def test_an_error_in_what_is_told_delays_no_revocation(keys):
    """Neither of this change nor of the next: the hub still watches."""
    one, two = enrolled(keys, "one"), enrolled(keys, "two")
    gone, timers = set(), Timers()

    def on_trouble(sentence):
        raise OSError(sentence)

    access = AllowListReader(keys, gone.update, on_trouble)
    edit(keys, lambda text: text.replace("one ", "# ") + "two device\n")
    access.watch(timers)
    with pytest.raises(OSError, match="expected NAME ROLE KEY"):
        timers.run_next()
    assert gone == {one.public}
    edit(keys, lambda text: text.replace("two ", "# "))
    timers.run_next()
    timers.run_next()
    assert gone == {one.public, two.public}


# -- over real sockets --------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_revoked_key_is_silent_within_a_second(commands, keys):
    """The worst of all times between the change of the file and the end of the connection.

    Each is revoked with an update in pieces, one that waits for a flush, or one that may still be on its way.
    """
    times, hub_key = [], keys.pair().public
    hub, address = start_hub(commands, keys, more='[policy.aggregate]\nkind = "buffered"\ncount = 3\n')
    for number in range(repetitions("keys that are revoked")):
        name = f"pi-{number}"
        pair = enrolled(keys, name)
        with client(address, pair, hub_key) as device:
            welcome = device.join(name, name.encode().ljust(16, b"."))
            begin_push(device, welcome, pieces=number % 3 == 0)
            if number % 3 == 1:
                assert device.hear().ack.outcome == Buffered(1)
            keys.revoke(name)
            began_s = time.monotonic()
            device.ended()
            times.append(time.monotonic() - began_s)
            assert device.failure() == zmq.EVENT_HANDSHAKE_FAILED_AUTH, "libzmq connects again, and is denied"
        hub.wait_for("revoked", device=name)
    assert max(times) < 1.0, times
    hub.signal(15)
    assert hub.wait() == 0
    assert_replayed(commands)


def assert_replayed(commands):
    """Check that a replay of the hub's journal ends with the model that the hub has saved."""
    run, again = commands.folder / "run-hub", commands.folder / "again.safetensors"
    told = commands.run("replay", run, "--json", "--export", again)
    assert told.returncode == 0, told
    assert '"revoked"' in told.stdout
    found, saved = map(safetensors.numpy.load_file, (again, run / "model.safetensors"))
    assert found.keys() == saved.keys()
    assert all(found[name].tobytes() == saved[name].tobytes() for name in saved)


@pytest.mark.process
def test_a_connection_that_has_said_nothing_yet_is_shut_too(commands, keys):
    pair = enrolled(keys)
    _, address = start_hub(commands, keys)
    with client(address, pair, keys.pair().public) as device:
        monitor = device.socket  # nothing is said
        ask(address, keys)
        keys.revoke("pi-1")
        device.ended()
        assert not monitor.poll(0)


@pytest.mark.process
def test_others_keep_their_connections(commands, keys):
    gone, stays, hub_key = enrolled(keys, "gone"), enrolled(keys, "stays"), keys.pair().public
    hub, address = start_hub(commands, keys)
    with client(address, gone, hub_key) as one, client(address, stays, hub_key) as other:
        assert is_welcome(one.join("gone", b"g" * 16))
        welcome = other.join("stays", b"s" * 16)
        keys.revoke("gone")
        one.ended()
        hub.wait_for("revoked", device="gone")
        other.say(Ping(welcome.session, 7.0, 0))
        assert other.hear() == Pong(7.0)
        assert not other.monitor.poll(0)


@pytest.mark.process
def test_revoked_while_the_hub_was_away(commands, keys):
    pair = enrolled(keys)
    hub, address = start_hub(commands, keys)
    with client(address, pair, keys.pair().public) as device:
        assert is_welcome(device.join("pi-1"))
    hub.signal(15)
    hub.wait()
    keys.revoke("pi-1")
    hub, address = start_hub(commands, keys)
    assert hub.wait_for("revoked")["device"] == "pi-1"


@pytest.mark.process
@pytest.mark.parametrize("away", [False, True])
def test_a_key_that_is_moved_to_another_name_leaves_its_old_name_free(commands, keys, away):
    pair, hub_key = enrolled(keys, "one"), keys.pair().public
    hub, address = start_hub(commands, keys)
    with client(address, pair, hub_key) as device:
        assert is_welcome(device.join("one"))
        if away:
            hub.signal(15)
            hub.wait()
        edit(keys, lambda text: text.replace("one ", "two "))
        if away:
            hub, address = start_hub(commands, keys)
        hub.wait_for("revoked", device="one")
        if not away:
            assert device.hear().code == "not_allowed"
            device.ended()
    with client(address, pair, hub_key) as device:
        assert device.join("one").code == "not_allowed"
        assert is_welcome(device.join("two"))
    with client(address, enrolled(keys, "one"), hub_key) as device:
        assert is_welcome(device.join("one", b"t" * 16))


@pytest.mark.process
def test_an_enrolled_agent_that_is_revoked_ends_and_says_why(commands, keys):
    hub, address = start_hub(commands, keys)
    agent = start_agent(commands, keys, address)
    keys.revoke("pi-1")
    hub.wait_for("revoked")
    assert agent.wait() == ACCESS
    assert "this device's key was revoked" in agent.stderr
    assert start_agent(commands, None, address).wait() == ACCESS


@pytest.mark.process
def test_an_agent_that_was_away_when_it_was_revoked_waits_and_says_why(commands, keys):
    """What a handshake says when it fails is not proved: nobody on the way ends an agent that has joined."""
    address = free_address()
    hub, _ = start_hub(commands, keys, bind=address)
    agent = start_agent(commands, keys, address)
    hub.kill()
    keys.revoke("pi-1")
    start_hub(commands, keys, bind=address)
    until(lambda: any("key: it was revoked" in line for line in agent.lines), "the reason")
    assert denied(address, keys, "revoked")
    agent.signal(15)
    assert agent.wait() == 0


def start_agent(commands, keys, address):
    """Start an agent, with a token where there are keys to make it by; wait until it has joined."""
    flags = ["--state", commands.folder / "state", "--json"]
    if keys is not None:
        flags += ["--enrol", keys.issue_token("pi-1", (address,), time.time()).text()]
    agent = commands.start("agent", "--data", commands.data("d.npz"), *flags)
    if keys is not None:
        agent.wait_for("joined")
    return agent
