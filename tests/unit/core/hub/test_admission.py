"""Leases, connections, strikes and pauses of devices."""

import math

import pytest

from edgeasync.core.hub.admission import REFUSED_MAX
from edgeasync.core.hub.effects import Assign, Broadcast, Fold, HubReport
from edgeasync.core.hub.events import Heard, HubReceived, HubReceivedMalformed, HubStopRequested
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.policies.aggregation import QuorumAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Ping

LEASE_S = 15.0


def test_a_quarantine_that_is_over_holds_no_place(hub_bench):
    hub = hub_bench(limits={"devices_max": 1, "strikes_max": 1, "quarantine_s": 30.0})
    hub.hello("a")
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
    hub.tick(29.0)
    hub.hello("b")
    assert hub.refused == "hub_full"
    hub.tick(30.0)
    hub.hello("b")
    assert hub.reports == ["joined"]


# -- liveness ------------------------------------------------------------------------------------------------


def test_exactly_the_silent_are_lost_at_the_deadline(hub_bench):
    hub = hub_bench(checkpoint=CheckpointSettings(every="1000 hours"))
    for at_s, name in enumerate("abc"):
        hub.hello(name, at_s=float(at_s))
    hub.ping("b", at_s=10.0)
    lost = []
    while (deadline_s := hub.core.next_deadline_s()) < 100.0:
        hub.tick(deadline_s)
        lost += [(deadline_s, report.device_id) for report in hub.all_of(HubReport) if report.event == "lost"]
        lost_peers = [hub.peers[report.device_id] for report in hub.all_of(HubReport)]
        assert hub.forgotten == lost_peers
    assert lost == [(15.0, "a"), (17.0, "c"), (25.0, "b")]
    assert hub.core.members.live_count == 0


def test_the_status_says_since_when_a_device_is_here_and_why_it_left(hub_bench):
    hub = hub_bench(limits={"strikes_max": 2, "quarantine_s": 30.0})

    def shown(name="a"):
        (device,) = [one for one in hub.core.status(hub.now_s)["devices"] if one["id"] == name]
        return device["joined_s"], device["why_left"], device["last_error"], device["last_error_s"]

    hub.hello("a", at_s=1.0)
    hub.hello("a", session=hub.sessions["a"], at_s=3.0)
    assert shown() == (2.0, "", "", None), "a reconnection is not a new start"
    hub.tick(18.0)
    assert shown() == (17.0, "nothing heard for 15.0 s", "", None)
    hub.ping("a", at_s=20.0)
    assert shown() == (0.0, "", "", None)
    hub.leave("a", "paused", at_s=21.0)
    assert shown()[1] == "paused by its program"
    hub.hello("a", start=2, at_s=22.0)
    assert shown() == (0.0, "", "", None)
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"), 23.0)
    assert shown()[1:] == ("", "nonsense", 0.0)
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"), 24.0)
    assert shown()[1:] == ("quarantined after 2 malformed messages", "nonsense", 0.0)


def test_who_is_refused_is_shown_until_it_joins_or_gives_up(hub_bench):
    hub = hub_bench(limits={"devices_max": 1})
    hub.hello("a", at_s=1.0)
    hub.hello("b", at_s=2.0)
    told = hub.core.status(3.0)
    assert [*told["refused"]] == ["b"]
    assert told["refused"]["b"].startswith("the hub is full")
    hub.leave("a", at_s=4.0)
    hub.hello("b", at_s=5.0)
    assert hub.core.status(5.0)["refused"] == {}
    hub.hello("c", at_s=6.0)
    assert [*hub.core.status(605.0)["refused"]] == ["c"]
    assert hub.core.status(606.0)["refused"] == {}
    hub.hello("b", state=7, at_s=7.0)
    assert [*hub.core.status(8.0)["refused"]] == ["c"]
    (shown,) = hub.core.status(8.0)["devices"]
    assert shown["last_error"].startswith("a device named b is already connected"), "a member has it as its error"
    for number in range(2 * REFUSED_MAX):
        hub.hello(f"d{number}", at_s=9.0)
    assert [*hub.core.status(9.0)["refused"]] == [f"d{number}" for number in range(REFUSED_MAX, 2 * REFUSED_MAX)]


TRAFFIC = {
    "ping": lambda hub: hub.ping(),
    "fetch": lambda hub: hub.fetch(),
    "refused fetch": lambda hub: hub.fetch(capacity=False),
    "push": lambda hub: hub.push(),
    "refused push": lambda hub: hub.push(capacity=False),
    "offer": lambda hub: hub.offer(),
    "piece": lambda hub: hub.give(Heard(hub.peers["a"], "piece")),
    "credit": lambda hub: hub.give(Heard(hub.peers["a"], "credit")),
    "hello": lambda hub: hub.hello(session=hub.sessions["a"]),
}


@pytest.mark.parametrize("say", TRAFFIC.values(), ids=TRAFFIC)
def test_any_traffic_renews_the_lease_and_revives_the_lost(hub_bench, say):
    hub = hub_bench(checkpoint=CheckpointSettings(every="1000 hours"))
    hub.hello()
    hub.tick(14.0)
    say(hub)
    hub.tick(28.9)
    assert hub.reports == []
    hub.tick(29.0)
    assert hub.reports == ["lost"]
    hub.tick(500.0)
    say(hub)
    assert "rejoined" in hub.reports
    assert hub.core.members.live_count == 1
    hub.tick(514.9)
    assert hub.reports == []
    hub.tick(515.0)
    assert hub.reports == ["lost"]


def test_a_new_connection_takes_over_and_the_old_is_forgotten(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.ping(peer=b"second")
    assert hub.forgotten == [b"a 1"]
    hub.push(seq=1, peer=b"second")
    assert hub.forgotten == []
    assert hub.one(Assign).peer == b"second"


def test_a_connection_that_becomes_another_device_is_never_mistaken_for_the_first(hub_bench):
    hub = hub_bench()
    hub.join("a", peer=b"x")
    hub.hello("b", peer=b"x")
    hub.tick(1000.0)
    assert hub.reports == ["lost", "lost"]
    assert b"" not in hub.forgotten


def test_a_trainer_that_hangs_is_paused_until_it_steps_again(hub_bench):
    hub = hub_bench(liveness={"progress_s": 20.0})
    hub.join()
    hub.ping(steps=3, at_s=1.0)
    assert hub.state_of() == "training"
    for at_s in (11.0, 21.0):
        hub.ping(steps=3, at_s=at_s)
        assert hub.reports == []
    hub.ping(steps=3, at_s=21.5)
    assert (hub.reports, hub.state_of()) == (["paused"], "paused")
    hub.ping(steps=3, at_s=31.0)
    assert hub.reports == []
    hub.ping(steps=4, at_s=32.0)
    assert (hub.reports, hub.state_of()) == (["training"], "training")
    hub.ping(steps=4, at_s=60.0)
    hub.push(seq=1, at_s=61.0)
    assert "training" in hub.reports


def test_who_left_is_not_lost_and_may_come_back(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave()
    assert (hub.reports, hub.state_of(), hub.forgotten) == (["left"], "left", [b"a 1"])
    hub.tick(100.0)
    assert hub.reports == []
    hub.hello(start=2)
    assert hub.reports == ["rejoined"]


# -- faults --------------------------------------------------------------------------------------------------


def test_a_quarantine_for_ever_is_told_as_long_as_the_wire_can(hub_bench):
    hub = hub_bench(limits={"strikes_max": 1, "quarantine_s": math.inf})
    hub.join()
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
    hub.hello(start=2)
    told = wire.decode(wire.encode(hub.refusal))
    assert (told.code, told.retry_after_s) == ("quarantined", 1e9)


def test_strikes_quarantine_a_member_and_time_heals_it(hub_bench):
    hub = hub_bench(limits={"strikes_max": 3, "quarantine_s": 30.0})
    hub.join()
    for strikes in (1, 2, 3):
        hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
        assert hub.refused == "malformed"
        assert (hub.reports == ["quarantined"]) == (strikes == 3)
    assert hub.forgotten == [hub.peers["a"]]
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
    assert hub.effects == []
    hub.give(HubReceivedMalformed(hub.peers["a"], "a piece too late", strike=False))
    assert hub.effects == []
    for say in (hub.ping, hub.push, hub.fetch, lambda: hub.hello(start=2), lambda: hub.hello(state=2)):
        say()
        assert (hub.refused, hub.refusal.retry_after_s) == ("quarantined", 30.0)
    hub.give(Heard(hub.peers["a"], "piece"))
    assert hub.refused == "quarantined"
    hub.tick(31.0)
    hub.hello(start=2)
    assert hub.reports == ["rejoined"]
    for _ in range(2):
        hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
        assert hub.reports == []
    assert hub.state_of() == "joining"


def test_what_a_connection_did_as_a_strangers_does_not_decide_about_the_member_it_became(hub_bench):
    """Strikes of strangers are not written down: a hub that was restarted would decide in another way."""
    hub = hub_bench(limits={"strikes_max": 2})
    hub.join("a")
    for _ in range(3):
        hub.give(HubReceivedMalformed(b"x", "nonsense"))
    hub.hello("b", peer=b"x")
    assert "b" not in hub.core.members.members
    hub.give(HubReceived(b"x", Ping(hub.sessions["a"], 0.0, 1)))
    hub.hello("b", peer=b"x")
    assert hub.core.members.members["b"].peer == b"x"


def test_a_ping_after_the_quarantine_clears_the_strikes(hub_bench):
    hub = hub_bench(limits={"strikes_max": 2, "quarantine_s": 5.0})
    hub.join()
    for _ in range(2):
        hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
    hub.ping(at_s=5.0)
    assert hub.reports == ["rejoined"]
    hub.give(HubReceivedMalformed(hub.peers["a"], "nonsense"))
    assert hub.state_of() == "joining"


def test_a_stranger_is_answered_until_it_has_too_many_strikes(hub_bench):
    hub = hub_bench(limits={"strikes_max": 3})
    for _ in range(3):
        hub.give(HubReceivedMalformed(b"x", "nonsense"))
        assert hub.refused == "malformed"
    for _ in range(5):
        hub.give(HubReceivedMalformed(b"x", "nonsense"))
        assert hub.effects == []
    hub.hello(peer=b"x")
    assert (hub.refused, hub.refusal.retry_after_s) == ("quarantined", 300.0)
    hub.hello(peer=b"y")
    assert hub.reports == ["joined"]


def test_strangers_are_remembered_within_bounds(hub_bench):
    hub = hub_bench()
    for number in range(5000):
        hub.give(HubReceivedMalformed(number.to_bytes(4, "big"), "nonsense"))


# -- paces ---------------------------------------------------------------------------------------------------

PAUSED = {"pace_percent": 0, "pace_reason": "85 C", "temperature_c": 85.0}
QUORUM = Policy(
    aggregate=QuorumAggregator(share=1.0, patience=100.0), optimizer=(SGD(),), frequency=FixedFrequency()
)


def test_a_device_that_pauses_is_paused_with_its_reason_until_it_says_otherwise(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.ping(steps=3, **PAUSED)
    assert hub.one(HubReport) == HubReport("paused", "a", "85 C")
    assert hub.state_of() == "paused"
    hub.ping(steps=4, pace_percent=0, pace_reason="86 C", temperature_c=86.0)
    assert (hub.state_of(), hub.reports) == ("paused", []), "the running step ended"
    (device,) = hub.core.status(0.0)["devices"]
    assert [device[key] for key in ("state", "pace_reason", "temperature_c")] == ["paused", "86 C", 86.0]
    hub.ping(steps=4, pace_percent=50, pace_reason="76 C", temperature_c=76.0)
    assert hub.one(HubReport) == HubReport("training", "a", "takes local steps again")
    (device,) = hub.core.status(0.0)["devices"]
    assert [device[key] for key in ("state", "pace_percent", "pace_reason")] == ["training", 50, "76 C"]


def test_a_device_that_pauses_after_its_update_still_counts_with_it(hub_bench):
    hub = hub_bench(QUORUM)
    for name in ("a", "b", "c"):
        hub.join(name)
    hub.push("a", 1)
    hub.ping("a", **PAUSED)
    hub.push("b", 1)
    assert hub.all_of(Fold) == [], "c is still awaited"
    hub.push("c", 1)
    assert len(hub.one(Fold).handles) == 3
    hub.push("b", 2, base=1)
    hub.push("c", 2, base=1)
    assert len(hub.one(Fold).handles) == 2, "a has no vote in the next version"
    hub.push("a", 2, base=1)  # of steps from before the pause
    assert hub.state_of("a") == "paused"
    hub.ping("a")
    hub.push("b", 3, base=2)
    hub.push("c", 3, base=2)
    assert len(hub.one(Fold).handles) == 3


@pytest.mark.parametrize("end", ["leave", "lost", "hello"])
def test_a_pause_ends_with_the_session(hub_bench, end):
    hub = hub_bench()
    hub.join()
    hub.ping(**PAUSED)
    {
        "leave": hub.leave,
        "lost": lambda: hub.tick(LEASE_S),
        "hello": lambda: hub.hello(session=hub.sessions["a"]),
    }[end]()
    assert hub.core.members.members["a"].pace_percent == 100
    assert hub.state_of() == {"leave": "left", "lost": "lost", "hello": "joining"}[end]


def shown(hub):
    (device,) = hub.core.status(hub.now_s)["devices"]
    return device["state"], device["pace_percent"], device["pace_reason"]


def test_a_device_that_says_goodbye_for_a_pause_is_shown_as_paused_and_holds_no_lease(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    assert hub.one(HubReport) == HubReport("left", "a", "paused")
    assert shown(hub) == ("paused", 0, "paused by its program")
    assert (hub.core.members.live_count, hub.core.members.voters) == (0, {})
    hub.tick(10 * LEASE_S)
    assert shown(hub)[0] == "paused", "not lost"


BACK = {
    "hello": (lambda hub: hub.hello(start=2), "joining"),
    "the same session": (lambda hub: hub.ping(steps=1), "training"),
    "goodbye": (lambda hub: (hub.hello(start=2), hub.leave()), "left"),
    "lost": (lambda hub: (hub.hello(start=2), hub.tick(hub.now_s + 2 * LEASE_S)), "lost"),
    "revoked": (lambda hub: hub.core.members.expel(hub.core.members.members["a"]), "left"),
}


@pytest.mark.parametrize("back", BACK)
def test_a_pause_with_a_goodbye_ends_when_the_device_is_heard_again(hub_bench, back):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    act, state = BACK[back]
    act(hub)
    assert shown(hub) == (state, 100, "")
    hub.core.check()


def test_a_hub_that_comes_back_still_shows_who_had_paused(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    hub.core.members.resume(hub.now_s, connected=False)
    assert shown(hub)[0] == "paused"


def test_nothing_is_ever_sent_to_no_one(hub_bench):
    """A member whose connection became another's has none until it speaks again."""
    hub = hub_bench()
    hub.join("a", peer=b"x")
    hub.hello("b", peer=b"x")
    hub.give(HubStopRequested())
    assert [sent.peers for sent in hub.all_of(Broadcast)] == [(b"x",)]
