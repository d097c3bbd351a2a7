"""The hub's threads for folds, the journal, checkpoints and evaluations."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from edgeasync.host.completion import Completion
from edgeasync.host.worker import Worker

CLOSE_S = 60.0
"""Seconds that a stopping hub waits for its last fold and for writes to disk."""

Thread = Literal["fold", "journal", "save", "evaluate"]
Result = TypeVar("Result")


class HubThreads:
    """Runs work in named threads, and passes results to the event loop.

    Each thread runs its work in the order of submission. An exception in a thread, or in a callback
    that receives a result, ends the hub.
    """

    def __init__(self, ending: Completion) -> None:
        self._ending = ending
        self._workers: dict[Thread, Worker] = {}

    def begin(self) -> None:
        """Use the running event loop from now on. Work that is submitted before `start` is queued."""
        self.loop = asyncio.get_running_loop()
        names: tuple[Thread, ...] = ("fold", "journal", "save", "evaluate")
        self._workers = {name: Worker(name, self._fail) for name in names}

    def start(self) -> None:
        """Start the threads."""
        for worker in self._workers.values():
            worker.start()

    def submit(self, thread: Thread, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""
        self._workers[thread].submit(work)

    def run(self, thread: Thread, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in a thread, then call `then` with its result on the event loop."""
        self.submit(thread, lambda: self.hand_over(work(), then))

    def hand_over(self, result: Result, then: Callable[[Result], None]) -> None:
        """Schedule `then` with a result on the event loop; called from a worker thread."""
        self.loop.call_soon_threadsafe(self.guard, partial(then, result))

    def guard(self, action: Callable[[], None]) -> None:
        """Call `action` on the event loop. If it raises an exception, end the hub."""
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self._ending.fail(error)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the event loop after `delay_s` seconds."""
        self.loop.call_later(delay_s, self.guard, action)

    async def close(self, thread: Thread) -> bool:
        """Wait until a thread has finished its work, then return whether it ended in time.

        The event loop is not blocked meanwhile.
        """
        return await asyncio.to_thread(self._workers[thread].close, CLOSE_S)

    def abandon(self) -> None:
        """Stop waiting for all threads."""
        for worker in self._workers.values():
            worker.abandon()

    def _fail(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self._ending.fail, error)
