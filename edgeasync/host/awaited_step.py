"""Run a trainer's coroutine `step` on the event loop, while the training thread waits for it."""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable

from edgeasync.training.trainer import StepResult


class AwaitedStep:
    """Takes steps on an event loop, one at a time. `cancel` abandons the current step.

    Once `stopping` is set, every step is abandoned, and `concurrent.futures.CancelledError` is
    raised in the thread that waits for it.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._running: concurrent.futures.Future[StepResult] | None = None

    def in_thread(
        self, loop: asyncio.AbstractEventLoop, step: Callable[[], StepResult | Awaitable[StepResult]]
    ) -> Callable[[], StepResult] | None:
        """Return a function that takes a step on the loop and waits for it.

        Returns `None` if `step` is not a coroutine function.
        """
        if not inspect.iscoroutinefunction(step):
            return None

        def take() -> StepResult:
            self._running = asyncio.run_coroutine_threadsafe(step(), loop)
            if self._stopping.is_set():
                self._running.cancel()
            return self._running.result()

        return take

    def cancel(self) -> None:
        """Abandon the current step, if there is one."""
        if self._running is not None:
            self._running.cancel()
