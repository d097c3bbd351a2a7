"""Keeps traffic within a rate, evenly and without a thread or a clock: virtual scheduling, as in the GCRA.

The sender waits until `due_s`, sends a message, and calls `spend` with its size. A message that must not wait,
such as a heartbeat, is sent at once, and later messages then wait longer.
"""

LATENESS_S = 0.02
"""A sender that is this much too late may catch up; a rate that was unused for longer is lost."""


class Pacer:
    """Spaces out messages so that together they keep to `bytes_per_s`.

    In any time T no more than `bytes_per_s` times (T + `LATENESS_S`) bytes and one message are sent, apart from
    messages that must not wait.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a rate of {bytes_per_s} bytes a second moves nothing")
        self.bytes_per_s = bytes_per_s
        self.due_s = 0.0
        """When the next message may be sent."""

    def change(self, bytes_per_s: float, now_s: float) -> None:
        """Keep to another rate from now on; what was sent already is waited for at that rate."""
        self.due_s = now_s + (self.due_s - now_s) * min(1e6, self.bytes_per_s / bytes_per_s)
        self.bytes_per_s = bytes_per_s

    def give_back(self, size_bytes: int) -> None:
        """Wait for these bytes no longer: they were counted before they were sent."""
        self.due_s -= size_bytes / self.bytes_per_s

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Count a message that is sent now, even if it was sent before `due_s`."""
        self.due_s = max(self.due_s, now_s - LATENESS_S) + size_bytes / self.bytes_per_s
