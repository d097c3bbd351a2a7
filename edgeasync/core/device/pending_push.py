"""The one update of a device that has no answer yet, and the numbers that keep it from counting twice."""

import msgspec

from edgeasync.protocol.messages import Ack, Push, Welcome


class ModelKey(msgspec.Struct, frozen=True):
    """What an update is of: the spec's fingerprint, the training graph's, and the kind of update."""

    fingerprint: str
    graph: str | None
    update: str

    @classmethod
    def of(cls, welcome: Welcome) -> "ModelKey":
        """Return the key of what a hub trains."""
        return cls(welcome.spec.fingerprint, welcome.graph, welcome.update)


class PendingPush:
    """`push`, until it is answered or given up, and `seq_last`, the last number that was answered.

    The hub's record is what counts: the last number, and the checksum of the update that had it. The number alone
    does not name an update, since a hub that was put back to an older state sees numbers used again. A hub without
    a record takes the device's word, so the device must not give away a number under which its update may have
    counted without it knowing.
    """

    def __init__(self) -> None:
        self.push: Push | None = None
        self.seq_last = 0
        self._said = False
        self._recalled: ModelKey | None = None

    def make(self, push: Push) -> None:
        """Hold a new update, which has the next number."""
        assert push.seq == self.seq_last + 1
        self.push = push
        self._said, self._recalled = False, None

    def recall(self, push: Push, model: ModelKey) -> None:
        """Hold an update that was made, and perhaps answered, before this start."""
        self.push, self.seq_last = push, push.seq - 1
        self._said, self._recalled = True, model

    def say(self, session: bytes) -> Push | None:
        """Return the update as it is sent in a session, if there is one."""
        if self.push is not None:
            self._said = True
            if self.push.session != session:
                self.push = msgspec.structs.replace(self.push, session=session)
        return self.push

    def claim(self) -> int:
        """Return what to say to a hub is the last number answered.

        Only a hub that does not know the device believes it. It may have counted the update before it forgot the
        device, so the number after that is claimed: what the hub then says tells it from one that knows, and
        nothing counts twice.
        """
        return self.push.seq + 1 if self._said and self.push is not None else self.seq_last

    def drop_foreign(self, welcome: Welcome) -> bool:
        """Drop an update from before this start unless it is of what this hub trains; return whether it was."""
        foreign = self._recalled is not None and self._recalled != ModelKey.of(welcome)
        if foreign:
            self.push = None
        return foreign

    def agree(self, seq_last: int, checksum_last: int | None) -> str:
        """Adopt the hub's record of the last update it answered; return why the one here is dropped, if it is.

        Without a checksum, from a hub that names none, the number has to do.
        """
        push, self._recalled = self.push, None
        self.seq_last = seq_last
        if push is None:
            return ""
        recorded = seq_last == push.seq if checksum_last is None else checksum_last == push.checksum
        recorded = recorded and seq_last > 0  # a hub that has answered nothing has no record
        if self._said and recorded:
            # It was answered: its outcome will be repeated.
            self.seq_last = seq_last - 1
        elif self._said and push.seq <= seq_last:
            # The hub forgot this device, or was put back to a state in which another update had the number, or a
            # copy of the device went further. The push may have counted, so it must not get a new number.
            self.push = None
            return f"the hub is past push {push.seq} and cannot say whether it counted: it is dropped"
        # Where it goes back by more than one, the hub was put back, and remembers less than it had answered.
        self.push = msgspec.structs.replace(push, seq=self.seq_last + 1)
        return ""

    def answered(self, ack: Ack) -> bool:
        """Let go of the update if this is its answer; return whether it is."""
        if self.push is None or ack.seq != self.push.seq:
            return False
        self.push, self.seq_last = None, ack.seq
        return True
