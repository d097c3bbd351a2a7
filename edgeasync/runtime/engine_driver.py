"""Run an engine's actions and timers on an event loop."""

import asyncio
import contextlib
import time
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

    def begin(self) -> None:
        """Use the running event loop from now on."""
        self.loop = asyncio.get_running_loop()

    def do(self, action: Callable[[], None]) -> None:
        """Run `action`, then set the timer for the next deadline. Call it on the event loop."""
        if self._ending.reached:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        self.cancel()
        due_s = self._next_deadline_s()
        if due_s is not None:
            self._timer = self.loop.call_later(max(0.0, due_s - time.monotonic()), self.do, self._tick)

    def do_from_thread(self, action: Callable[[], None]) -> None:
        """Schedule `action` on the loop from another thread. Does nothing if the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.do, action)

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
