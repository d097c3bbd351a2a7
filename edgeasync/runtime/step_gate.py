"""What a training thread waits for between two local steps: a pause to end, or the pace of the device."""

import threading
import time

DRAWN_OUT_S = 1.0
"""How often a thread that draws a step out shows that it does not hang."""


class StepGate:
    """Lets a thread take steps at a pace, unless a person wants none; `share` is the part of the time, 0 a pause.

    The thread calls `wait`, `count` and `draw_out`, the agent's loop all other methods.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.ending = threading.Event()
        """Set once the local steps are abandoned."""
        self.steps_total = 0
        self._stands_still = False
        self._is_open = threading.Event()
        self._is_open.set()
        self._stepped_s = 0.0

    def begin(self) -> None:
        """Count a standstill from now on."""
        self._stepped_s = time.monotonic()

    def wait(self) -> bool:
        """Wait while no steps are wanted; return whether they are abandoned."""
        self._is_open.wait()
        return self.ending.is_set()

    def count(self) -> None:
        """Count a step."""
        self.steps_total += 1
        self._stepped_s = time.monotonic()

    def draw_out(self, remaining_s: float) -> None:
        """Wait for the rest of a step, which is no standstill, however long it takes."""
        until_s = time.monotonic() + remaining_s
        while remaining_s > 0.0 and not self.ending.wait(min(remaining_s, DRAWN_OUT_S)):
            self._stepped_s = time.monotonic()
            remaining_s = until_s - self._stepped_s

    def stalled_s(self, begun_s: float | None) -> float:
        """Return for how long work that began then has ended no step; 0 without work, and in a pause."""
        if begun_s is None or not self._is_open.is_set():
            return 0.0
        return time.monotonic() - max(begun_s, self._stepped_s)

    def stand_still(self, *, asked: bool) -> None:
        """Take no steps for as long as a person has asked for that."""
        self._stands_still = asked
        self._follow()

    def set_share(self, share: float) -> None:
        """Take steps at another pace."""
        self.share = share
        self._follow()

    def end(self) -> None:
        """Abandon the local steps."""
        self.ending.set()
        self._is_open.set()

    def _follow(self) -> None:
        """Open unless a person or the pace wants no steps; an end is not held up."""
        if self.ending.is_set() or (not self._stands_still and self.share):
            self._stepped_s = time.monotonic()
            self._is_open.set()
        else:
            self._is_open.clear()
