"""One background thread that does what it is given, in order."""

import contextlib
import time
from collections.abc import Callable
from queue import SimpleQueue

from edgeasync.host.at_exit import OwnThread


class Worker:
    """A daemon thread, so that a step of training that takes minutes never keeps a stopped process alive.

    `on_error` is called, in the thread, with whatever a piece of work raises, until the thread is abandoned.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_error = on_error
        self._abandoned = False
        self.begun_s: float | None = None
        """When the thread began what it is doing, by the monotonic clock; `None` while it waits for work."""
        self._thread = OwnThread(name, self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread.ident is not None

    def submit(self, work: Callable[[], object]) -> None:
        """Do `work` after all that was submitted before."""
        self._queue.put(work)

    def close(self, timeout_s: float) -> bool:
        """Let the thread end after the work it has; return whether it did so in time, else it is abandoned."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._abandoned = self._thread.is_alive()
        return not self._abandoned

    def abandon(self) -> None:
        """Let the thread end after the work it has, without waiting for that, and hear of no error any more.

        By then there may be no loop to hand anything to.
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
                    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is there to hear of it
                        self._on_error(error)
            self.begun_s = None
            del work  # while the thread waits for more: it may hold a payload as large as the model
