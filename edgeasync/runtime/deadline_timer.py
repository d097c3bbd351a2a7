"""A timer on an event loop, whose due time can only be moved to an earlier time."""

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """Calls `on_due` on the running event loop at the earliest time that was set."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def set(self, due_s: float, now_s: Callable[[], float]) -> None:
        """Set the timer to `due_s`, unless an earlier time is already set.

        `now_s` returns the current time of the clock on which `due_s` is a time. Infinity means
        that there is no deadline.
        """
        if self._handle is not None:
            if due_s >= self._due_s:
                return
            self._handle.cancel()
        self._handle, self._due_s = None, due_s
        if due_s < math.inf:
            delay_s = max(0.0, due_s - now_s())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._call)

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._handle is not None:
            self._handle.cancel()

    def _call(self) -> None:
        self._handle = None
        self._on_due()
