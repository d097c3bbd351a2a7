"""Peers average without a hub: each mean is that of all members' snapshots, whatever dies when."""

import msgspec
import pytest

from edgeasync.core.peer.backoff import FREE
from edgeasync.core.peer.effects import SendToPeer
from edgeasync.core.peer.events import PeerReceived, PeerStopRequested, RoundDue, RoundHalfDue, SnapshotTaken
from edgeasync.protocol.peer_messages import (
    ROUND_LEAP_MAX,
    Abandon,
    Offer,
    PeerCredit,
    PeerPiece,
    PeerPing,
    RoundId,
    RoundMember,
)
from tests.support.simulation.harness import shrink
from tests.support.simulation.peer_faults import Rogue
from tests.support.simulation.peer_harness import meet_in_a_round, round_times, run_peers
from tests.support.simulation.peer_mutants import PEER_MUTANTS
from tests.support.simulation.peer_world import REFUSED_KINDS_MAX, SETTINGS, VALUE_BYTES, World, on_the_wire
from tests.support.size import repetitions

BATCH = 5


@pytest.mark.parametrize("batch", range(repetitions("seeds of peers") // BATCH))
def test_whatever_happens_to_peers_each_mean_is_of_all_members_and_they_agree_in_the_end(batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        result = run_peers(seed)
        assert not result.failure, f"seed {seed}\n{result.plan.write()}{result.where}"
        assert result.means_applied > 0


def test_the_same_seed_of_peers_gives_the_same_run():
    assert run_peers(3) == run_peers(3)
    assert run_peers(3).trace != run_peers(4).trace


@pytest.mark.parametrize("name", PEER_MUTANTS.changes)
def test_a_bug_planted_in_a_peer_is_noticed(name):
    assert PEER_MUTANTS.is_noticed(name, run_peers)


def test_the_known_seed_of_every_bug_in_a_peer_is_written_down():
    assert PEER_MUTANTS.seeds().keys() == PEER_MUTANTS.changes.keys()
    assert max(PEER_MUTANTS.seeds().values()) < PEER_MUTANTS.seeds_max


def test_a_failing_plan_of_peers_is_cut_down():
    with PEER_MUTANTS.planted("a corrupt payload counts"):
        seed = PEER_MUTANTS.seeds()["a corrupt payload counts"]
        plan = shrink(seed, run_peers(seed).plan, run_peers)
        assert 0 < len(plan.faults) < len(run_peers(seed).plan.faults)
        assert run_peers(seed, plan).failure
    assert not run_peers(seed, plan).failure


# -- what a round costs ----------------------------------------------------------------------------------------


def made(count, topology="ring", *, values, seed=1, uplink_bytes_per_s=100_000, **changes):
    """Return peers with other settings than usual, which have yet to start."""
    settings = msgspec.structs.replace(SETTINGS, codec="exact", **changes)
    world = World(seed, count, topology=topology, values=values, settings=settings)
    for device in world.devices.values():
        device.uplink_bytes_per_s = uplink_bytes_per_s
    return world


def calm(count, topology="ring", **changes):
    """Return peers on good links that have completed their first round together, and its name."""
    world = made(count, topology, values=5 * 8 * count, **changes)
    world.start()
    assert meet_in_a_round(world, set(world.names), 5.0)
    return world, world.completed(world.names[0])


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_member_of_a_ring_sends_two_n_minus_one_nths_of_a_model_a_round_to_the_byte(count):
    world, round_id = calm(count)
    model_bytes = VALUE_BYTES * 5 * 8 * count
    assert {device.sent_bytes[round_id] * count for device in world.devices.values()} == {
        2 * (count - 1) * model_bytes
    }


@pytest.mark.parametrize("count", [2, 5])
def test_in_all_to_all_a_member_sends_a_model_to_each_other(count):
    world, round_id = calm(count, "all_to_all")
    model_bytes = VALUE_BYTES * 5 * 8 * count
    assert {device.sent_bytes[round_id] for device in world.devices.values()} == {(count - 1) * model_bytes}


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_a_cut_transfer_resumes_where_it_was_cut(topology):
    in_flight_bytes = 48 * (2 if topology == "all_to_all" else 1)
    again_bytes = []
    for sent_bytes in (50, 150, 250, 350):
        world, whole = calm(3, topology, window_bytes=48)
        sender = world.devices["peer-0"]
        cut = msgspec.structs.replace(whole, number=whole.number + 1)
        assert world.run(lambda it=sender, cut=cut, at=sent_bytes: it.sent_bytes[cut] > at, 2.0)
        world.cut = dict.fromkeys(world.latency_s, world.clock.now_s + 0.3)
        assert world.run(lambda its=world, cut=cut: all(its.completed(name) == cut for name in its.names), 2.0)
        again_bytes += [device.sent_bytes[cut] - device.sent_bytes[whole] for device in world.devices.values()]
    assert min(again_bytes) >= 0
    assert 0 < max(again_bytes) <= in_flight_bytes


def test_nothing_is_sent_twice_on_links_so_slow_that_a_piece_takes_longer_than_a_ping():
    slow = {"uplink_bytes_per_s": 4000, "piece_bytes": 960, "window_bytes": 1920}
    world = made(3, "all_to_all", values=600, lease_s=2.5, ping_s=0.5, **slow)
    world.start()
    assert meet_in_a_round(world, set(world.names), 20.0)
    whole = world.completed("peer-0")
    assert {device.sent_bytes[whole] for device in world.devices.values()} == {2 * 600 * VALUE_BYTES}


def with_a_slow_uplink(topology):
    """Return four peers. A payload takes peer-1 longer than a lease."""
    pieces = {"piece_bytes": 960, "window_bytes": 1920}
    world = made(4, topology, values=4000, uplink_bytes_per_s=1_000_000, lease_s=2.0, ping_s=0.4, **pieces)
    world.devices["peer-1"].uplink_bytes_per_s = 4000
    world.start()
    return world


def test_all_to_all_waits_for_a_slow_link_and_sends_nothing_twice():
    world = with_a_slow_uplink("all_to_all")
    assert meet_in_a_round(world, set(world.names), 50.0)
    whole = world.completed("peer-0")
    assert {device.sent_bytes[whole] for device in world.devices.values()} == {3 * 4000 * VALUE_BYTES}


def test_a_ring_leaves_out_whose_link_is_slow_and_nobody_who_only_waits_behind_it():
    world = with_a_slow_uplink("ring")
    others = set(world.names) - {"peer-1"}
    assert meet_in_a_round(world, others, 10.0)
    world.pass_time(60.0)
    reports = [report for name in others for _, report in world.devices[name].reports]
    assert {report.peer for report in reports if report.event == "warning"} == {"peer-1"}
    assert [report.event for report in reports].count("round_done") > 3 * 60


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_an_offer_that_overtakes_the_proposal_waits_for_it_and_not_for_a_ping(topology):
    world = made(4, topology, values=160, lease_s=10.0, ping_s=2.0, piece_bytes=960, window_bytes=1920)
    world.latency_s = dict.fromkeys(world.latency_s, 0.001)
    world.latency_s["peer-0", "peer-2"] = 0.04  # from the proposer
    world.start()
    world.pass_time(10.0)
    reports = [report.event for device in world.devices.values() for _, report in device.reports]
    assert reports.count("round_done") > 4 * 10  # a round is due 0.3 s after the last one, and takes up to 0.5 s


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_who_gives_a_round_up_is_in_the_next_one_and_need_not_wait_for_a_ping(topology):
    """Each of these seeds failed with one of two faults.

    The others served the round, and left the device out until its next ping; or they took it for the lost one.
    """
    for seed in (3, 9, 25, 29, 46, 59, 138):
        how = {"lease_s": 3.0, "ping_s": 0.6, "piece_bytes": 240, "window_bytes": 960}
        world = made(4, topology, values=160, seed=seed, **how)
        world.start()
        assert meet_in_a_round(world, set(world.names), 5.0)
        world.pass_time(world.random.uniform(1.0, 2.0))
        round_s = max(round_times(world, 0.0))
        lost = world.random.choice(world.names)
        world.devices[lost].kill()
        limit_s = world.settings.lease_s + world.settings.round_every_s + 2 * round_s
        assert meet_in_a_round(world, set(world.names) - {lost}, limit_s), seed


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("served", [True, False])
def test_who_gives_up_a_round_that_others_have_completed_says_whether_it_can_be_in_the_next_one(served, ready):
    world, _ = calm(3, "all_to_all")
    world.latency_s["peer-0", "peer-1"] = world.latency_s["peer-2", "peer-1"] = 0.05
    core = world.devices["peer-0"].core
    assert world.run(lambda: core.rounds.current is None, 2.0)
    assert world.run(lambda: core.rounds.current is not None and core.rounds.current.state == "serving", 2.0)
    round_id = core.rounds.current.id
    assert not core.neighbours["peer-1"].has_completed(round_id)
    if served:
        assert world.run(lambda: core.rounds.current is None, 2.0)
    world.devices["peer-0"].handle(PeerReceived("peer-1", on_the_wire(Abandon(round_id, "lost", ready=ready))))
    assert ("peer-1" in [each.name for each in core._candidates(world.clock.now_s)]) == ready


def test_who_leaves_in_a_round_is_ready_for_no_other(middle):
    world, core = middle
    sent = [
        each.message
        for each in core.handle(PeerStopRequested(), world.clock.now_s)
        if isinstance(each, SendToPeer)
    ]
    assert [message.ready for message in sent if isinstance(message, Abandon)] == [False, False]


# -- one proposer after the other ------------------------------------------------------------------------------


def test_a_peer_that_never_proposes_delays_the_others_by_a_lease_a_round(monkeypatch):
    world, _ = calm(3)
    lowest = world.devices["peer-0"].core
    monkeypatch.setattr(lowest, "_proposes_at_s", lambda now_s: float("inf"))
    world.pass_time(1.0)  # its last round
    assert meet_in_a_round(world, set(world.names), SETTINGS.lease_s + SETTINGS.round_every_s + 0.2)
    assert world.completed("peer-0").proposer == "peer-1"


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_a_peer_that_leaves_in_order_costs_the_others_no_round(topology):
    world, before = calm(5, topology)

    def leaver():
        through = [each for each in world.devices.values() if each.running and each.core.rounds.current is None]
        return next((each for each in through if each.core.rounds.completed != before), None)

    for _ in range(3):
        assert world.run(leaver, 2.0)
        leaves = leaver()
        before = leaves.core.rounds.completed
        members = world.members(before)
        leaves.stop()
        world.pass_time(0.2)
        assert {name for known, name, _ in world.checks.applied if known == before} == members


def test_two_groups_average_apart_and_meet_again():
    world, _ = calm(4)
    apart = [{"peer-0", "peer-1"}, {"peer-2", "peer-3"}]
    for one in apart[0]:
        for other in apart[1]:
            world.cut[one, other] = world.cut[other, one] = float("inf")
    for group in apart:
        assert meet_in_a_round(world, group, 3.0)
    world.cut.clear()
    assert meet_in_a_round(world, set(world.names), 4.0)


def test_a_peer_alone_trains_on_and_is_in_the_next_round_of_another():
    world = World(0, 2, topology="ring", settings=SETTINGS)
    first, second = world.devices.values()
    first.start()
    world.pass_time(5.0)
    assert first.steps > 40
    assert [report.event for _, report in first.reports] == ["alone"]
    second.start()
    assert meet_in_a_round(world, set(world.names), 1.0)


def test_a_round_is_due_after_steps_if_times_do_not_say_so():
    settings = msgspec.structs.replace(SETTINGS, round_steps=10)
    world = World(0, 3, settings=settings)
    world.start()
    world.pass_time(5.0)
    assert not world.checks.applied
    world.devices["peer-0"].handle(RoundDue())
    assert meet_in_a_round(world, set(world.names), 1.0)
    world.pass_time(3.0)
    assert len(world.checks.means) == 1


# -- how fast rounds follow each other, and what failed ones cost -----------------------------------------------


def between_rounds(**changes):
    """Return peers of which peer-1 has just completed a round, its core, and the next proposal of peer-2."""
    world, _ = calm(3, **changes)
    core = world.devices["peer-1"].core
    assert world.run(lambda: core.rounds.current is not None and core.rounds.current.state == "exchanging", 5.0)
    proposal = core.rounds.current.proposal
    assert world.run(lambda: core.rounds.current is None, 2.0)
    assert core.rounds.completed == proposal.round
    round_id = RoundId(core.rounds.completed.number + 5, "peer-2", world.devices["peer-2"].incarnation)
    return world, core, msgspec.structs.replace(proposal, round=round_id)


def receive(world, core, sender, message):
    """Give a core a message, and return the messages to the sender that are not pings."""
    effects = core.handle(PeerReceived(sender, on_the_wire(message)), world.clock.now_s)
    sent = [effect.message for effect in effects if isinstance(effect, SendToPeer) and effect.peer == sender]
    return [message for message in sent if not isinstance(message, PeerPing)]


def test_a_proposal_sooner_than_half_the_interval_is_declined_and_does_not_count():
    world, core, early = between_rounds(round_every_s=4.0)
    completed = core.rounds.completed
    assert receive(world, core, "peer-2", early) == [Abandon(early.round, "early")]
    assert core.rounds.current is None
    assert core.rounds.completed == completed
    assert core.rounds.number < early.round.number
    world.pass_time(1.9)
    assert receive(world, core, "peer-2", early) == [Abandon(early.round, "early")]
    world.pass_time(0.2)
    assert receive(world, core, "peer-2", early) == []
    assert core.rounds.current.id == early.round


def test_a_peer_whose_trainer_wants_a_round_waits_until_half_the_interval_has_passed():
    world, _ = calm(3, round_every_s=4.0)
    first = world.devices["peer-0"]
    assert world.run(lambda: first.core.rounds.current is None, 2.0)
    first.handle(RoundDue())
    assert meet_in_a_round(world, set(world.names), 2.5)
    assert not any("early" in report.detail for _, report in first.reports)


def test_a_round_that_a_member_has_given_up_is_repeated_at_once_but_only_one_time():
    world, core, again = between_rounds(round_every_s=4.0)
    receive(world, core, "peer-0", Abandon(core.rounds.completed, "lost", ready=True))
    assert receive(world, core, "peer-2", again) == []
    assert core.rounds.current.id == again.round
    core.rounds.current, core.rounds.completed = None, again.round  # as if it had become whole
    core.rounds.schedule.note_applied(world.clock.now_s)
    receive(world, core, "peer-0", Abandon(again.round, "lost", ready=True))
    further = msgspec.structs.replace(again.round, number=again.round.number + 1)
    proposal = msgspec.structs.replace(again, round=further)
    assert receive(world, core, "peer-2", proposal) == [Abandon(further, "early")]


def test_a_round_that_was_abandoned_before_any_mean_is_repeated_at_once():
    world, core, early = between_rounds(round_every_s=4.0)
    world.pass_time(2.1)
    assert receive(world, core, "peer-2", early) == []
    receive(world, core, "peer-2", Abandon(early.round, "failed", ready=True))
    assert core.rounds.current is None
    further = msgspec.structs.replace(early.round, number=early.round.number + 1)
    core.handle(SnapshotTaken(early.round), world.clock.now_s)
    receive(world, core, "peer-2", msgspec.structs.replace(early, round=further))
    assert core.rounds.current.id == further


def test_with_steps_a_proposal_waits_until_half_of_them_are_taken():
    world = World(1, 3, topology="ring", values=120, settings=msgspec.structs.replace(SETTINGS, round_steps=10))
    world.start()
    world.pass_time(0.5)
    for _ in range(2):
        world.devices["peer-0"].handle(RoundDue())
        assert world.run(lambda: len(world.checks.means) == 1, 1.0)
        world.pass_time(0.5)
    assert world.devices["peer-1"].core.rounds.current is None
    world.devices["peer-1"].handle(RoundHalfDue())
    assert world.devices["peer-1"].core.rounds.current is not None
    world.devices["peer-2"].handle(RoundHalfDue())
    assert world.run(lambda: len(world.checks.means) == 2, 1.0)


def test_a_proposal_that_waits_is_dropped_with_its_round():
    world = World(1, 3, topology="ring", values=120, settings=msgspec.structs.replace(SETTINGS, round_steps=10))
    world.start()
    world.pass_time(0.5)
    for _ in range(2):
        world.devices["peer-0"].handle(RoundDue())
        world.pass_time(0.5)
    world.devices["peer-0"].handle(PeerStopRequested())
    world.pass_time(0.1)
    world.devices["peer-1"].handle(RoundHalfDue())
    assert world.devices["peer-1"].core.rounds.current is None


@pytest.mark.parametrize(
    ("round_every_s", "round_steps", "said"),
    [
        (0.001, None, "it uses round_every_s = 0.001, this device round_every_s = 0.3"),
        (float("nan"), None, "it uses round_every_s = nan, this device round_every_s = 0.3"),
        (0.3, 10, "it uses round_steps = 10, this device round_every_s = 0.3"),
    ],
)
def test_peers_that_disagree_about_the_interval_say_both_and_are_in_no_round(round_every_s, round_steps, said):
    world, _ = calm(3)
    first = world.devices["peer-0"]
    first.kill()
    honest = world.settings
    world.settings = msgspec.structs.replace(honest, round_every_s=round_every_s, round_steps=round_steps)
    first.start()
    world.settings = honest
    assert meet_in_a_round(world, {"peer-1", "peer-2"}, 5.0)
    for name in ("peer-1", "peer-2"):
        refused = [report for _, report in world.devices[name].reports if report.event == "refused"]
        assert [report.detail for report in refused] == [f"another interval between rounds: {said}"]
        assert {report.peer for report in refused} == {"peer-0"}


def deaf_pair(seed, topology):
    """Return three peers of which two do not hear each other; a round takes longer than three leases."""
    slow = {"uplink_bytes_per_s": 4000, "piece_bytes": 960, "window_bytes": 1920}
    world = made(3, topology, values=1800, seed=seed, **slow)
    world.cut = {("peer-0", "peer-2"): float("inf"), ("peer-2", "peer-0"): float("inf")}
    world.start()
    return world


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_two_that_do_not_hear_each_other_do_not_preempt_each_other_for_ever(topology):
    world = deaf_pair(1, topology)
    world.pass_time(60.0)
    middle = world.devices["peer-1"]
    done = [report.event for _, report in middle.reports].count("round_done")
    assert done > 2
    assert sum(middle.sent_bytes.values()) < 4 * done * VALUE_BYTES * 1800


def test_who_has_to_wait_as_a_proposer_is_no_member_either():
    """It says in its pings that it is in its own round, and would end each one of the others by that."""
    world, _ = calm(3)
    core = world.devices["peer-0"].core
    for _ in range(FREE + 1):
        core.rounds.backoff.note_failed("peer-2", world.clock.now_s)
    assert meet_in_a_round(world, {"peer-0", "peer-1"}, 2.0)


# -- what a peer says is checked -------------------------------------------------------------------------------


@pytest.fixture
def middle():
    """A world of three peers in the middle of a round, and the core of the second one."""
    world, _ = calm(3)
    core = world.devices["peer-1"].core
    sent_bytes = world.devices["peer-1"].sent_bytes
    assert world.run(lambda: core.rounds.current is not None and sent_bytes[core.rounds.current.id] > 0, 2.0)
    return world, core


def ping(core, number=0, **changes):
    known = core.neighbours["peer-0"].ping
    return msgspec.structs.replace(known, count=known.count + 1, number=number, **changes)


def members(*names):
    return tuple([RoundMember(name, 10) for name in names])


def propose(core, number, proposer="peer-0", names=("peer-0", "peer-1", "peer-2"), **changes):
    round_id = RoundId(number, proposer, 10)
    return msgspec.structs.replace(
        core.rounds.current.proposal, round=round_id, members=members(*names), **changes
    )


HOSTILE = {
    "a message from an unlisted peer": lambda core: ("stranger", ping(core)),
    "another model, or other settings of the exchange": lambda core: ("peer-0", ping(core, fingerprint="beef")),
    "an old ping": lambda core: ("peer-0", core.neighbours["peer-0"].ping),
    "a ping from before a restart": lambda core: ("peer-0", ping(core, incarnation=9)),
    "a round too far ahead": lambda core: ("peer-0", ping(core, number=2 * ROUND_LEAP_MAX)),
    "a round in another peer's name": lambda core: ("peer-2", propose(core, 9)),
    "another round under the same number": lambda core: (
        "peer-0", propose(core, core.rounds.current.id.number, names=("peer-0", "peer-1")),
    ),
    "a round that is over": lambda core: ("peer-0", propose(core, 0)),
    "a round whose members are not in order": lambda core: (
        "peer-0", propose(core, 9, names=("peer-1", "peer-0", "peer-2")),
    ),
    "a round without its proposer": lambda core: ("peer-0", propose(core, 9, names=("peer-1", "peer-2"))),
    "a round without this peer's current start": lambda core: (
        "peer-0", propose(core, 9, names=("peer-0", "peer-2")),
    ),
    "a round with an unlisted member": lambda core: (
        "peer-0", propose(core, 9, names=("peer-0", "peer-1", "peer-9")),
    ),
    "a round with an unknown codec": lambda core: ("peer-0", propose(core, 9, codec="none")),
    "a round with another topology or piece size": lambda core: (
        "peer-0", propose(core, 9, topology="all_to_all"),
    ),
    "a round that was not proposed": lambda core: ("peer-0", PeerCredit(RoundId(9, "peer-0", 10), 0, 0)),
    "a step of another sender": lambda core: ("peer-2", Offer(core.rounds.current.id, 0, 8, 0)),
    "a payload that is too long": lambda core: ("peer-0", Offer(core.rounds.current.id, 3, 2**40, 0)),
    "a piece that was not offered": lambda core: ("peer-0", PeerPiece(core.rounds.current.id, 3, 0, 0)),
    "a credit for a payload that was not offered": lambda core: (
        "peer-2", PeerCredit(core.rounds.current.id, 3, 0),
    ),
    "a credit for bytes that were not sent": lambda core: ("peer-2", PeerCredit(core.rounds.current.id, 0, 2**50)),
}  # fmt: skip


@pytest.mark.parametrize("why", HOSTILE)
def test_what_does_not_fit_is_refused_by_name_and_the_next_round_is_whole(middle, why):
    world, core = middle
    before = core.refusals.counts[why]
    sender, message = HOSTILE[why](core)
    world.devices["peer-1"].handle(PeerReceived(sender, on_the_wire(message)))
    assert core.refusals.counts[why] == before + 1
    assert meet_in_a_round(world, set(world.names), 3.0)


def test_messages_are_the_same_after_they_were_sent(middle):
    _, core = middle
    round_id = core.rounds.current.id
    for message in (
        ping(core, current=round_id), core.rounds.current.proposal, Offer(round_id, 1, 2, 2**64 - 1, 4),
        PeerCredit(round_id, 1, 2, again=True), PeerPiece(round_id, 1, 2, 3),
        Abandon(round_id, "stalled", -1, ("peer-0",), ready=True),
    ):  # fmt: skip
        assert on_the_wire(message) == message


def test_no_message_makes_a_core_raise_or_its_memory_grow():
    for seed in range(20):
        world, _ = calm(4, ("ring", "all_to_all")[seed % 2])
        world.pass_time(seed / 50)
        rogue = world.devices["peer-3"]
        rogue.kill()
        speaker = Rogue(world, rogue, 0.0, seed)
        for _ in range(300):
            name = speaker.random.choice(world.names[:3])
            message = speaker._message()
            sender = speaker.random.choice([*world.names, "nobody"])
            world.part = speaker.random.randbytes(speaker.random.randint(1, 40))
            event = PeerReceived(sender, message, len(world.part), speaker.random.random() < 0.1)
            world.devices[name].handle(event)
            world.pass_time(0.001)
        for name in world.names[:3]:
            core = world.devices[name].core
            assert len(core.refusals._told) <= 4 * REFUSED_KINDS_MAX
            assert len(core.rounds.suspicion._left_out) <= 4
