"""A background thread that runs submitted work in order."""

import contextlib
import time
from collections.abc import Callable
from queue import SimpleQueue

from edgeasync.host.at_exit import OwnThread


class Worker:
    """A daemon thread, so that a long local step cannot prevent a stopped process from ending.

    If work raises an exception, `on_error` is called with it in the thread, unless the thread has
    been abandoned.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_error = on_error
        self._abandoned = False
        self._submitted = self._ended = 0
        self.begun_s: float | None = None
        """Monotonic time at which the current work began; `None` while the thread waits for work.
        """
        self._thread = OwnThread(name, self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread.ident is not None

    @property
    def is_idle(self) -> bool:
        """Whether all submitted work has ended. Read it only in the thread that submits all work."""
        return self._submitted == self._ended

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` after all work that was submitted before."""
        self._submitted += 1
        self._queue.put(work)

    def close(self, timeout_s: float) -> bool:
        """Wait until the thread has finished its work, and return whether it ended in time.

        If it did not, abandon it.
        """
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._abandoned = self._thread.is_alive()
        return not self._abandoned

    def abandon(self) -> None:
        """Stop waiting for the thread, which finishes its work alone, and ignore its errors.

        The event loop may no longer exist by then.
        """
        self._abandoned = True
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self.begun_s = time.monotonic()
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                if not self._abandoned:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._on_error(error)
            self.begun_s = None
            del work  # frees a payload as large as the model while the thread waits
            self._ended += 1
