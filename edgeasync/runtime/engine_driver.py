"""Run an engine's actions and timers on an event loop."""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from edgeasync.host.completion import Completion


class EngineDriver:
    """Runs an engine's actions one at a time, until `ending` has a reason or an error.

    It calls `tick` at the time that `next_deadline_s` returns, and asks for this time again after
    every action. If an action raises an error, it calls `fail` with the error. All calls run on the
    event loop that was running when `begin` was called.
    """

    def __init__(
        self,
        ending: Completion,
        tick: Callable[[], None],
        next_deadline_s: Callable[[], float | None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._ending = ending
        self._tick, self._next_deadline_s, self._fail = tick, next_deadline_s, fail
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._next: deque[Callable[[], None]] = deque()
        self._running = False

    def begin(self) -> None:
        """Use the running event loop from now on."""
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def do(self, action: Callable[[], None]) -> None:
        """Run `action`, then set the timer for the next deadline. Call it on the event loop."""
        if self._ending.reached:
            return
        self._running = True
        try:
            self._run(action)
            while self._next and not self._ending.reached:
                self._run(self._next.popleft())
        finally:
            self._running = False
        due_s = self._next_deadline_s()
        if due_s is None:
            self.cancel()
        elif due_s < self._timer_s:
            self._set_timer(due_s)

    def do_next(self, action: Callable[[], None]) -> None:
        """Run `action` after the current action, from any thread, even after the loop has ended."""
        if self._running and threading.get_ident() == self._thread:
            self._next.append(action)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.do, action)

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def cancel(self) -> None:
        """Cancel the timer."""
        self._timer_s = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, due_s: float) -> None:
        self.cancel()
        self._timer_s = due_s
        self._timer = self.loop.call_later(max(0.0, due_s - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        """Tick if a deadline has passed, otherwise set the timer again.

        When a deadline moves to a later time, which is common, the timer still fires at the earlier
        time.
        """
        self._timer_s = math.inf
        due_s = self._next_deadline_s()
        if due_s is not None and due_s > time.monotonic():
            self._set_timer(due_s)
        elif due_s is not None:
            self.do(self._tick)
