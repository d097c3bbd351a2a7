"""Limit a sender's rate evenly, without threads or a clock, by virtual scheduling (as in the GCRA).

The sender waits until `due_s`, sends a message, and calls `spend` with the size of the message. A
message that must not wait, such as a heartbeat, is sent at once; later messages then wait longer.
"""

LATENESS_S = 0.02
"""A late sender may catch up on at most this time. Bandwidth that it left unused earlier is lost.
"""


class Pacer:
    """Schedules messages so that their rate stays within `bytes_per_s`.

    In any interval of T seconds, the sender sends at most `bytes_per_s` times (T + `LATENESS_S`)
    bytes plus one message. Messages that must not wait are not counted in this limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"rate of {bytes_per_s} bytes per second is too low; pass a rate over 0")
        self.bytes_per_s = bytes_per_s
        self.due_s = 0.0
        """The time at which the next message may be sent."""

    def change(self, bytes_per_s: float, now_s: float) -> None:
        """Change the rate. Bytes that are already scheduled are rescheduled at the new rate."""
        self.due_s = now_s + (self.due_s - now_s) * min(1e6, self.bytes_per_s / bytes_per_s)
        self.bytes_per_s = bytes_per_s

    def give_back(self, size_bytes: int) -> None:
        """Undo `spend` for bytes that were counted but not sent."""
        self.due_s -= size_bytes / self.bytes_per_s

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Count a message that is sent now. It may be sent before `due_s`."""
        self.due_s = max(self.due_s, now_s - LATENESS_S) + size_bytes / self.bytes_per_s
