"""What a device holds: the version of its hub's model, and the one update that has no answer yet."""

import msgspec

from edgeasync.protocol.messages import Ack, ModelVersion, Push, Welcome


class ModelKey(msgspec.Struct, frozen=True):
    """Which model an update belongs to: the fingerprints of spec and training graph, and the kind of update."""

    fingerprint: str
    graph: str | None
    update: str

    @classmethod
    def of(cls, welcome: Welcome) -> "ModelKey":
        """Return the key of what a hub trains."""
        return cls(welcome.spec.fingerprint, welcome.graph, welcome.update)


class HeldVersion:
    """The version that the device holds, with the checksum of its model; both are `None` without one."""

    def __init__(self) -> None:
        self.version: ModelVersion | None = None
        self.checksum: int | None = None
        self._recalled: tuple[ModelKey, ModelVersion, int] | None = None
        """The model that an earlier start held, until the hub has said what it trains."""

    def recall(self, model: ModelKey, version: ModelVersion, checksum: int) -> None:
        """Resume with a version that an earlier start held, if the hub trains that model."""
        self._recalled = model, version, checksum

    def welcomed(self, welcome: Welcome) -> None:
        """Hold the version of an earlier start again if it is of the hub's model, else forget it."""
        if self._recalled is not None and self._recalled[0] == ModelKey.of(welcome):
            _, self.version, self.checksum = self._recalled
        self._recalled = None

    def install(self, version: ModelVersion, checksum: int | None) -> None:
        """Hold this version instead."""
        self.version, self.checksum = version, checksum

    def lose(self) -> None:
        """Hold none."""
        self.version = self.checksum = None


class PendingPush:
    """`push`, until it is answered or given up, and `seq_last`, the last number that was answered.

    The hub's record decides: the last number it answered, and the checksum of that update. The number alone does
    not identify an update: after a hub was restored to an older state, devices use numbers a second time. A hub
    without a record adopts the device's number. So the device must not offer it a number under which this update
    may have counted already.
    """

    def __init__(self) -> None:
        self.push: Push | None = None
        self.seq_last = 0
        self._checksum_last: int | None = None
        self._said = False
        self._recalled: ModelKey | None = None

    def make(self, push: Push) -> None:
        """Hold a new update, which has the next number."""
        assert push.seq == self.seq_last + 1
        self.push = push
        self._said, self._recalled = False, None

    def recall(self, push: Push, model: ModelKey) -> None:
        """Hold an update that an earlier start made; the hub may have answered it since."""
        self.push, self.seq_last = push, push.seq - 1
        self._said, self._recalled = True, model

    def say(self, session: bytes) -> Push | None:
        """Return the update as it is sent in this session, if there is one."""
        if self.push is not None:
            self._said = True
            if self.push.session != session:
                self.push = msgspec.structs.replace(self.push, session=session)
        return self.push

    def claim(self) -> int:
        """Return the number to state in a hello as the last one answered.

        Only a hub that does not know the device adopts it. Such a hub may have counted the update before it forgot
        the device, so claim the number after the update's. The hub's record in the welcome then shows whether it
        knew the device, and no update counts twice.
        """
        return self.push.seq + 1 if self._said and self.push is not None else self.seq_last

    def drop_foreign(self, welcome: Welcome) -> bool:
        """Drop an earlier start's update if it belongs to another model than the hub's; return whether it did."""
        foreign = self._recalled is not None and self._recalled != ModelKey.of(welcome)
        if foreign:
            self.push = None
        return foreign

    def agree(self, seq_last: int, checksum_last: int) -> str:
        """Adopt the hub's record of its last answer; return why the pending update is dropped, if it is."""
        push, self._recalled = self.push, None
        self.seq_last = seq_last
        if push is None:
            return ""
        recorded = checksum_last == push.checksum
        if recorded and seq_last == push.seq - 1 and checksum_last == self._checksum_last:
            recorded = False  # the record is that of the update before, which had the same bytes
        recorded = recorded and seq_last > 0  # a hub that has answered nothing has no record
        if self._said and recorded:
            # The hub has answered it, and will repeat the outcome.
            self.seq_last = seq_last - 1
        elif self._said and push.seq <= seq_last:
            # The hub forgot this device, or was restored to a state in which another update had the number, or a
            # copy of the device pushed more. The push may have counted, so it must not get a new number.
            self.push = None
            return f"the hub is past push {push.seq} and cannot say whether it counted: it is dropped"
        # If the number falls by more than one, the hub was restored to a state before its latest answers.
        self.push = msgspec.structs.replace(push, seq=self.seq_last + 1)
        return ""

    def answered(self, ack: Ack) -> bool:
        """Drop the update if this is its answer; return whether it is."""
        if self.push is None or ack.seq != self.push.seq:
            return False
        self.seq_last, self._checksum_last = ack.seq, self.push.checksum
        self.push = None
        return True
