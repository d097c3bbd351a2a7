"""Keeping traffic within a rate, evenly and without a thread or a clock: virtual scheduling, as in the GCRA.

Whoever sends asks whether it is time, sends, and says how much that was. What must not wait, such as a
heartbeat, is sent at once and counts as debt: what comes next waits the longer.
"""

LATENESS_S = 0.02
"""A timer that comes so much too late costs nothing of the rate; what is idle for longer is not made up for."""


class Pacer:
    """Spaces out messages so that together they keep to `bytes_per_s`.

    In any time T no more than `bytes_per_s` times (T + `LATENESS_S`) goes out, and one message; and what had to go
    at once.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a rate of {bytes_per_s} bytes a second moves nothing")
        self.bytes_per_s = bytes_per_s
        self.due_s = 0.0
        """When all that was sent is paid for: from then on it is time for more."""

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Count a message that is sent now, whether it was time or not."""
        self.due_s = max(self.due_s, now_s - LATENESS_S) + size_bytes / self.bytes_per_s
