"""Messages between peers: values out of bounds are rejected."""

import msgspec
import pytest

from edgeasync.protocol.peer_messages import Abandon, Offer, PeerPing, Propose, RoundId, RoundMember
from tests.support.simulation.peer_world import on_the_wire


def members(*names):
    return tuple([RoundMember(name, 10) for name in names])


@pytest.mark.parametrize(
    "message",
    [
        PeerPing(1, 1, "", 2**63, ready=True, heard=()),
        PeerPing(1, 1, "", 1, ready=True, heard=("peer",) * 65),
        PeerPing(1, 1, "no digits", 1, ready=True, heard=()),
        Propose(RoundId(1, "a", 1), "star", "identity", 24, members("a", "b")),
        Propose(RoundId(1, "a", 1), "ring", "identity", 2**25, members("a", "b")),
        Propose(RoundId(1, "a", 1), "ring", "identity", 24, members("a")),
        Offer(RoundId(1, "no name", 1), 1, 1, 1),
        Offer(RoundId(1, "a", 1), 128, 1, 1),
        Abandon(RoundId(1, "a", 1), "boredom"),
    ],
)
def test_messages_out_of_bounds_cannot_be_read(message):
    with pytest.raises(msgspec.ValidationError):
        on_the_wire(message)
