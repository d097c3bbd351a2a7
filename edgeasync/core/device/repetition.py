"""When a device repeats the message that has no answer. Part of `WorkCycle`."""

from random import Random

from edgeasync.core.device.hub_rotation import BACKOFF_MAX_S, BACKOFF_MIN_S


class Repetition:
    """`due_s` is when the message is sent again; `repeated` whether one was, on this connection.

    Two answers may then come to one message.
    """

    def __init__(self, random: Random) -> None:
        self.due_s = 0.0
        self.repeated = False
        self.busy = False
        """Whether the hub has asked to wait with updates, or to rest and the device trains on."""
        self._random = random

    def wait(self, now_s: float, for_s: float) -> None:
        """Give the hub this long to answer."""
        self.due_s = now_s + for_s

    def soon(self, now_s: float) -> None:
        """Repeat the message in a moment: the answer was of no use."""
        self.due_s = now_s + BACKOFF_MIN_S

    def back_off(self, now_s: float) -> None:
        """Repeat the message in a few seconds: the hub could not read it, or the device not the hub's payload."""
        self.due_s = now_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)

    def wait_for_busy(self, now_s: float, retry_after_s: float) -> None:
        """Repeat the message when a busy hub asks for it, or a little later: other devices were told the same."""
        spread_s = min(retry_after_s, 2.0 * BACKOFF_MAX_S) * self._random.uniform(0.0, 0.5)
        self.due_s = now_s + retry_after_s + spread_s
        self.busy = True
