"""Policies that the core has never heard of slot in: none of these kinds is in the library."""

from dataclasses import dataclass

import pytest

from edgeasync.core.hub.effects import Assign, Discard, Fold, SendToDevice
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import PolynomialStaleness
from edgeasync.protocol.messages import Ack, Applied, Buffered, Duplicate, Rejected

FULL_WEIGHT, SIXTEEN_STEPS = PolynomialStaleness(exponent=0.0), FixedFrequency(local_steps=16)


@dataclass(frozen=True)
class Buffer:
    """The mean of `count` updates; a device waits for it."""

    count: int
    answer: str = "at_flush"
    update: str = "delta"

    def flush_at_s(self, buffered, fleet):
        assert buffered
        return buffered[-1].arrived_s if len(buffered) >= self.count else None

    def weights(self, buffered, fleet):
        return tuple(contribution.weight / len(buffered) for contribution in buffered)


@dataclass(frozen=True)
class Deadline:
    """Everything that comes within `wait_s` of the first, or at once when every live device has spoken."""

    wait_s: float
    answer: str = "at_flush"
    update: str = "delta"

    def flush_at_s(self, buffered, fleet):
        if len({contribution.device_id for contribution in buffered}) >= fleet.voters_live:
            return buffered[-1].arrived_s
        return buffered[0].arrived_s + self.wait_s

    def weights(self, buffered, fleet):
        examples = sum(contribution.examples for contribution in buffered)
        return tuple(contribution.examples / examples for contribution in buffered)


def own_policy(**parts):
    """Some parts of our own among the library's."""
    library = {"staleness": FULL_WEIGHT, "aggregate": ImmediateAggregator(), "frequency": SIXTEEN_STEPS}
    return Policy(**library | {"optimizer": (SGD(),)} | parts)


def assigned(hub):
    return [(effect.peer, effect.version.number, effect.ack) for effect in hub.all_of(Assign)]


def acks(hub):
    return [(send.peer, send.message) for send in hub.all_of(SendToDevice) if isinstance(send.message, Ack)]


def test_buffered_devices_wait_for_their_flush(hub_bench):
    hub = hub_bench(own_policy(aggregate=Buffer(3)), liveness={"lease_s": 1e3})
    for name in "abcd":
        hub.join(name)
    for count, name in enumerate("ab", start=1):
        hub.push(name, 1)
        assert acks(hub) == [(hub.peers[name], Ack(1, Buffered(count)))]
        assert not assigned(hub)
    hub.push("d", 1, norm=float("nan"))
    assert assigned(hub) == [(hub.peers["d"], 0, Ack(1, Rejected("not_finite")))]
    hub.push("c", 1)
    fold = hub.one(Fold)
    assert (fold.number, fold.handles, fold.weights) == (1, (100, 101, 103), (1 / 3, 1 / 3, 1 / 3))
    assert assigned(hub) == [
        (hub.peers["c"], 1, Ack(1, Applied(1))),
        (hub.peers["a"], 1, None),
        (hub.peers["b"], 1, None),
    ]
    assert hub.core.updates_applied == 3
    hub.push("a", 2, base=1)
    assert acks(hub) == [(hub.peers["a"], Ack(2, Buffered(1)))]


def test_a_lost_answer_is_repeated_while_the_device_waits(hub_bench):
    hub = hub_bench(own_policy(aggregate=Buffer(2)), liveness={"lease_s": 1e3})
    for name in "ab":
        hub.join(name)
    hub.push("a", 1)
    hub.push("a", 1)
    hub.offer("b", 1)
    hub.push("a", 1, capacity=False)
    assert acks(hub) == [(hub.peers["a"], Ack(1, Duplicate(Buffered(1))))]
    assert not assigned(hub)
    assert len(hub.all_of(Discard)) == 1
    hub.push("b", 1)
    assert [peer for peer, _, _ in assigned(hub)] == [hub.peers["b"], hub.peers["a"]]
    hub.push("a", 1)
    assert assigned(hub) == [(hub.peers["a"], 1, Ack(1, Duplicate(Buffered(1))))]


def test_who_fetches_waits_on_and_who_reconnects_waits_no_more(hub_bench):
    hub = hub_bench(own_policy(aggregate=Buffer(4)), liveness={"lease_s": 50.0})
    for name in "abcd":
        hub.join(name)
        hub.push(name, 1) if name != "d" else None
    for capacity in (True, False):
        hub.fetch("a", capacity=capacity)
        assert hub.effects == [], "its answer comes with the next version"
    hub.hello("b", session=hub.sessions["b"], peer=b"again")
    hub.leave("c")
    hub.push("d", 1)
    assert assigned(hub) == [(hub.peers["d"], 1, Ack(1, Applied(1))), (hub.peers["a"], 1, None)]
    assert hub.one(Fold).handles == (100, 101, 102, 103)
    hub.fetch("a")
    assert assigned(hub) == [(hub.peers["a"], 1, None)]


@pytest.mark.parametrize("way", ["whole", "offered"])
def test_no_device_has_two_updates_in_a_version_it_waits_for(hub_bench, way):
    hub = hub_bench(own_policy(aggregate=Buffer(3)), liveness={"lease_s": 1e3})
    for name in "ab":
        hub.join(name)
    hub.push("a", 1)
    (hub.push if way == "whole" else hub.offer)("a", 2)
    assert hub.refused == "sequence"
    assert "while push 1 waits for a fold" in hub.refusal.sentence
    assert not hub.granted
    assert hub.core.policy_engine.gathering.count == 1
    # A device that starts again no longer waits, and gets an assignment.
    hub.hello("a", start=2)
    hub.fetch("a")
    assert assigned(hub) == [(hub.peers["a"], 0, None)]
    hub.push("a", 2)
    assert acks(hub) == [(hub.peers["a"], Ack(2, Buffered(2)))]
    hub.push("b", 1)
    assert len(hub.one(Fold).handles) == 3


def test_waiting_devices_are_told_to_fetch_when_there_is_no_room(hub_bench):
    hub = hub_bench(own_policy(aggregate=Deadline(4.0)))
    hub.join("a")
    hub.join("b")
    hub.push("a", 1, at_s=1.0)
    hub.tick(5.0, capacity=False)
    assert hub.refused == "busy"
    assert not assigned(hub)
    hub.fetch("a")
    assert assigned(hub) == [(hub.peers["a"], 1, None)]


def test_a_deadline_is_kept_by_the_clock_alone(hub_bench):
    hub = hub_bench(own_policy(aggregate=Deadline(4.0)))
    for name in "abc":
        hub.join(name)
    hub.push("a", 1, at_s=1.0, examples=30)
    hub.push("b", 1, at_s=3.0, examples=10)
    assert hub.core.next_deadline_s() == 5.0
    hub.tick(4.99)
    assert hub.effects == []
    hub.tick(5.0)
    assert hub.one(Fold).weights == (0.75, 0.25)
    assert hub.effects[0] == hub.one(Fold)
    assert assigned(hub) == [(hub.peers["a"], 1, None), (hub.peers["b"], 1, None)]
    for name in "abc":
        hub.push(name, 2 if name < "c" else 1, base=1, at_s=6.0)
    assert hub.one(Fold).number == 2


def test_a_device_that_goes_makes_the_flush_due(hub_bench):
    hub = hub_bench(own_policy(aggregate=Deadline(1e6)), checkpoint=CheckpointSettings(every="1000 hours"))
    hub.join("a")
    hub.join("b")
    hub.ping("b", at_s=1.0)
    hub.push("a", 1, at_s=10.0)
    assert hub.core.next_deadline_s() == 16.0
    hub.tick(16.0)
    assert hub.reports == ["lost"]
    assert hub.one(Fold).number == 1
    hub.join("b", start=2)
    hub.push("a", 2, base=1)
    hub.leave("b")
    assert hub.core.next_deadline_s() <= hub.now_s
    hub.tick()
    assert hub.one(Fold).number == 2


def test_updates_of_a_flush_by_the_clock_end_the_training(hub_bench):
    hub = hub_bench(own_policy(aggregate=Deadline(4.0)), stop={"updates": 2})
    for name in "abc":
        hub.join(name)
    hub.push("a", 1)
    hub.push("b", 1)
    hub.tick(4.0)
    assert hub.reports == ["finished"]
    assert hub.core.stopped


def test_stopping_folds_what_is_buffered_first(hub_bench):
    hub = hub_bench(own_policy(aggregate=Buffer(9)), stop={"minutes": 0.1})
    hub.join()
    hub.push(seq=1)
    hub.tick(6.0)
    assert [effect.handles for effect in hub.all_of(Fold)] == [(100,)]
    assert hub.core.updates_applied == 1
