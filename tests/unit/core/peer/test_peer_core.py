import pytest

from edgeasync.core.peer.effects import PeerReport, SendToPeer
from edgeasync.core.peer.events import PeerReceived, TrainingBegun
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.protocol.messages import Frozen
from edgeasync.protocol.peer_messages import ROUND_NUMBER_MAX, PeerPing

TICKS_MAX = 20


def test_a_peer_that_has_yet_to_begin_is_in_no_round():
    """Its model has learnt nothing: rounds with it would be over before it takes a step."""
    settings = PeerCoreSettings(lease_s=10.0, ping_s=2.0, round_every_s=1.0, begins_ready=False)
    core = PeerCore("a", 1, ("b",), settings)
    effects = core.begin(0.0)
    core.handle(PeerReceived("b", PeerPing(1, 1, "", 0, True, ("a",))), 0.0)
    while core.next_deadline_s < 5.0:
        effects += core.tick(core.next_deadline_s)
    assert [effect.message.ready for effect in effects if isinstance(effect, SendToPeer)] == [False] * 3
    assert core.rounds.current is None
    core.handle(TrainingBegun(), 5.0)
    ping, proposal = [
        effect.message for effect in core.tick(core.next_deadline_s) if isinstance(effect, SendToPeer)
    ]
    assert ping.ready
    assert proposal.round == core.rounds.current.id


def test_a_peer_without_round_numbers_left_does_not_run_hot():
    """A member that lies can use all numbers up, by one leap after another. Then no round begins."""
    core = PeerCore("a", 1, ("b",), PeerCoreSettings(lease_s=10.0, ping_s=2.0, round_every_s=1.0))
    core.begin(0.0)
    core.rounds.number = ROUND_NUMBER_MAX - 1  # it would take a liar 2**30 pings
    core.handle(PeerReceived("b", PeerPing(1, 1, "", ROUND_NUMBER_MAX, True, ("a",))), 0.0)
    assert [each.name for each in core.neighbours.live(0.0)] == ["b"]
    ticks = 0
    while (now_s := core.next_deadline_s) < 9.0 and ticks < TICKS_MAX:
        core.tick(now_s)
        ticks += 1
    assert ticks < TICKS_MAX
    assert core.rounds.current is None


RIGHT, OTHER, ONNX = Frozen("torch", "a" * 32), Frozen("torch", "b" * 32), Frozen("onnx", "c" * 32)


@pytest.mark.parametrize(
    ("frozen", "theirs", "event", "live"),
    [
        ("refuse", OTHER, "refused", []),
        ("warn", OTHER, "warning", ["b"]),
        ("refuse", RIGHT, None, ["b"]),
        ("refuse", None, None, ["b"]),
        ("refuse", ONNX, None, ["b"]),
    ],
)
def test_a_peer_with_other_frozen_arrays(frozen, theirs, event, live):
    """It is refused, or people are warned, once; one of which nothing is known, or with other names, is heard."""
    core = PeerCore("a", 1, ("b",), PeerCoreSettings(frozen=frozen, frozen_arrays=RIGHT))
    (ping,) = [effect.message for effect in core.begin(0.0) if isinstance(effect, SendToPeer)]
    assert ping.frozen == RIGHT
    effects = []
    for count in (1, 2):
        effects += core.handle(PeerReceived("b", PeerPing(1, count, "", 0, True, ("a",), frozen=theirs)), 0.0)
    told = [each for each in effects if isinstance(each, PeerReport) and each.event in ("refused", "warning")]
    assert [each.event for each in told] == ([] if event is None else [event])
    assert all("frozen arrays, which are not transmitted, differ" in each.detail for each in told)
    assert [each.name for each in core.neighbours.live(0.0)] == live
