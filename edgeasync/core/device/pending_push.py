"""A device's version of the hub's model, and its one unanswered update."""

import msgspec

from edgeasync.protocol.messages import Ack, ModelVersion, Push, Welcome


class ModelKey(msgspec.Struct, frozen=True):
    """Identifies the model of an update by the spec, the graph and the kind of update."""

    fingerprint: str
    graph: str | None
    update: str

    @classmethod
    def of(cls, welcome: Welcome) -> "ModelKey":
        """Return the key of the model that a hub's `Welcome` describes."""
        return cls(welcome.spec.fingerprint, welcome.graph, welcome.update)


class HeldVersion:
    """The version and the checksum of the model that the device has.

    Both are `None` if the device has no model.
    """

    def __init__(self) -> None:
        self.version: ModelVersion | None = None
        self.checksum: int | None = None
        self._recalled: tuple[ModelKey, ModelVersion, int] | None = None
        """The model from before a restart, until the hub's `Welcome` confirms that it is the hub's
        model.
        """

    def recall(self, model: ModelKey, version: ModelVersion, checksum: int) -> None:
        """Restore the version from before a restart, to be used if the hub trains that model."""
        self._recalled = model, version, checksum

    def welcomed(self, welcome: Welcome) -> None:
        """Use the version from before a restart if it belongs to the hub's model."""
        if self._recalled is not None and self._recalled[0] == ModelKey.of(welcome):
            _, self.version, self.checksum = self._recalled
        self._recalled = None

    def install(self, version: ModelVersion, checksum: int | None) -> None:
        """Replace the version."""
        self.version, self.checksum = version, checksum

    def lose(self) -> None:
        """Drop the version, because its model is lost."""
        self.version = self.checksum = None


class PendingPush:
    """The unanswered `push`, and the number of the last answered push, `seq_last`.

    The hub's record is authoritative. It contains the number of the last push that the hub
    answered, and the checksum of that update. The number alone does not identify an update, since
    devices reuse numbers after a hub was restored to an older state. A hub without a record adopts
    the number that the device reports. So the device must not report a number under which its
    pending update may already have counted.
    """

    def __init__(self) -> None:
        self.push: Push | None = None
        self.seq_last = 0
        self._checksum_last: int | None = None
        self._said = False
        self._recalled: ModelKey | None = None

    def make(self, push: Push) -> None:
        """Store a new update, which gets the next number."""
        assert push.seq == self.seq_last + 1
        self.push = push
        self._said, self._recalled = False, None

    def recall(self, push: Push, model: ModelKey) -> None:
        """Restore an update from before a restart. The hub may have answered it since then."""
        self.push, self.seq_last = push, push.seq - 1
        self._said, self._recalled = True, model

    def say(self, session: bytes) -> Push | None:
        """Return the pending update, if any, with its session replaced by this one."""
        if self.push is not None:
            self._said = True
            if self.push.session != session:
                self.push = msgspec.structs.replace(self.push, session=session)
        return self.push

    def claim(self) -> int:
        """Return the number of the last answered push, for a `Hello`.

        A hub adopts this number only if it does not know the device. Such a hub may have counted
        the pending update before it evicted the device. So if the pending update was sent, return
        its number plus 1. The hub's record in the welcome then shows whether it knew the device,
        and no update counts twice.
        """
        return self.push.seq + 1 if self._said and self.push is not None else self.seq_last

    def drop_foreign(self, welcome: Welcome) -> bool:
        """Drop an update from before a restart if it belongs to another model.

        Return whether an update was dropped.
        """
        foreign = self._recalled is not None and self._recalled != ModelKey.of(welcome)
        if foreign:
            self.push = None
        return foreign

    def agree(self, seq_last: int, checksum_last: int) -> str:
        """Adopt the hub's record of the push that it answered last.

        If this means that the pending update must be dropped, return the reason, otherwise "".
        """
        push, self._recalled = self.push, None
        self.seq_last = seq_last
        if push is None:
            return ""
        recorded = checksum_last == push.checksum
        if recorded and seq_last == push.seq - 1 and checksum_last == self._checksum_last:
            recorded = False  # the record is of the previous update, which had the same bytes
        recorded = recorded and seq_last > 0  # without an answer there is no record
        if self._said and recorded:
            # The hub has answered it, and will repeat the outcome.
            self.seq_last = seq_last - 1
        elif self._said and push.seq <= seq_last:
            # The hub evicted this device, or was restored to a state in which another update had
            # the number, or a copy of this device has pushed since. The push may have counted, so
            # it must not get a new number.
            self.push = None
            return f"the hub no longer knows whether push {push.seq} counted; dropping it"
        # If the number drops by more than one, the hub was restored to a state before its last
        # answers.
        self.push = msgspec.structs.replace(push, seq=self.seq_last + 1)
        return ""

    def answered(self, ack: Ack) -> bool:
        """Drop the pending update if `ack` is its answer; return whether it is."""
        if self.push is None or ack.seq != self.push.seq:
            return False
        self.seq_last, self._checksum_last = ack.seq, self.push.checksum
        self.push = None
        return True
