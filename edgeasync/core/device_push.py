"""The one update of a device that has no answer yet, and the numbers that keep it from counting twice."""

import msgspec

from edgeasync.core.device_spool import ModelKey
from edgeasync.protocol.messages import Ack, Duplicate, Outcome, Push, Welcome


class UnansweredPush:
    """`push`, until it is answered or given up, and `seq_last`, the last number that was answered.

    `heard` is the last number that the hub has named on the connection there is: it never goes back on one.

    The hub's record of the numbers is what counts. A hub that has none takes the device's word, so the device
    must not give away a number under which its update may have counted without it knowing.
    """

    def __init__(self) -> None:
        self.push: Push | None = None
        self.seq_last = self.heard = 0
        self._said = False
        self._recalled: ModelKey | None = None

    def make(self, push: Push) -> None:
        """Take over a new update, under the next number."""
        self.push = msgspec.structs.replace(push, seq=self.seq_last + 1)
        self._said, self._recalled = False, None

    def recall(self, push: Push, model: ModelKey) -> None:
        """Take over an update that was made, and perhaps answered, before this start."""
        self.push, self.seq_last = push, push.seq - 1
        self._said, self._recalled = True, model

    def say(self, session: bytes) -> Push | None:
        """Return the update as it is sent in a session, if there is one."""
        if self.push is not None:
            self.push = msgspec.structs.replace(self.push, session=session)
            self._said = True
        return self.push

    def claim(self, *, forgotten: bool) -> int:
        """Return what to say to a hub is the last number answered; `forgotten` if it may not know the device.

        Only such a hub believes it. It may have counted the update before it forgot the device, so the number
        after that is claimed: what the hub then says tells it from one that knows, and nothing counts twice.
        """
        doubtful = self._said and (forgotten or self._recalled is not None)
        return self.push.seq + 1 if doubtful and self.push is not None else self.seq_last

    def drop_foreign(self, welcome: Welcome) -> bool:
        """Drop an update from before this start unless it is of what this hub trains; return whether it was."""
        foreign = self._recalled is not None and self._recalled != ModelKey.of(welcome)
        if foreign:
            self.push = None
        return foreign

    def agree(self, seq_last: int) -> str:
        """Take the hub's word for the last number it answered; return why the update is dropped, if it is."""
        push = self.push
        self._recalled = None
        self.heard = seq_last
        if push is not None and seq_last == push.seq:
            return ""  # it was answered: its outcome will be repeated
        self.seq_last = seq_last
        if push is None:
            return ""
        if push.seq > seq_last:
            # By more than one: the hub was put back to an older state, and remembers less than it had answered.
            self.push = msgspec.structs.replace(push, seq=seq_last + 1)
            return ""
        # It forgot this device, or a copy of the device went further. The push may have counted, so it must not
        # get a new number.
        self.push = None
        return f"the hub is past push {push.seq} and cannot say whether it counted: it is dropped"

    def answered(self, ack: Ack) -> bool:
        """Take in an answer; return whether it is that of the update."""
        if self.push is None or ack.seq != self.push.seq:
            return False
        self.push, self.seq_last, self.heard = None, ack.seq, ack.seq
        return True


def describe(outcome: Outcome) -> str:
    """Return an outcome in words."""
    if isinstance(outcome, Duplicate):
        return f"duplicate of: {describe(outcome.first)}"
    values = ", ".join(str(value) for value in msgspec.structs.astuple(outcome))
    return f"{type(outcome).__name__.lower()} {values}"
