"""The one update without an answer, and what the hub's record says of it."""

import msgspec
import pytest

from edgeasync.core.device.pending_push import PendingPush
from edgeasync.protocol.messages import Ack, Applied, ModelVersion, Push

SESSION = bytes(16)
SAME, OTHER = 1, 2


def push(seq, checksum=SAME):
    return Push(SESSION, seq, ModelVersion("0" * 16, 3), 8, 64, 0.5, 0.25, 0.125, "identity", checksum, 12)


@pytest.mark.parametrize(
    ("before", "seq_last", "checksum_last", "sent_as"),
    [
        (SAME, 1, SAME, 2),  # the record is that of the update before, which had the same bytes
        (SAME, 2, SAME, 2),  # the hub has answered both
        (OTHER, 1, OTHER, 2),
        (OTHER, 1, SAME, 1),  # a hub that was restored counted this update under an earlier number
    ],
)
def test_an_update_with_the_bytes_of_the_one_before_is_not_taken_for_it(before, seq_last, checksum_last, sent_as):
    pending = PendingPush()
    pending.make(push(1, before))
    pending.say(SESSION)
    assert pending.answered(Ack(1, Applied(4)))
    pending.make(push(2))
    pending.say(SESSION)
    assert not pending.agree(seq_last, checksum_last)
    assert pending.push == msgspec.structs.replace(push(2), seq=sent_as)
