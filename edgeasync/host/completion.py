"""Record once why a hub, agent or peer ends: a reason, or an error that a task can raise."""

import asyncio
import traceback
from collections.abc import Callable

from edgeasync.errors import EdgeAsyncError


class Completion:
    """The reason or error that a hub, agent or peer ends with. `of` is the class name in messages.

    Only the first reason or error is used. After `begin`, use this object only from the event loop.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._future: asyncio.Future[str] | None = None

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._future is not None

    @property
    def reached(self) -> bool:
        """Whether a reason or an error is set."""
        return self._future is not None and self._future.done()

    def begin(self) -> None:
        """Start on the running loop; raises `EdgeAsyncError` the second time."""
        if self.begun:
            raise EdgeAsyncError(f"{self._of}.run() was called before; create another {self._of} to run again")
        self._future = asyncio.get_running_loop().create_future()

    def reach(self, reason: str) -> None:
        """End with a reason."""
        assert self._future is not None
        if not self.reached:
            self._future.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End with an error. If a task cannot raise the error, wrap it in an `EdgeAsyncError`."""
        assert self._future is not None
        if not self.reached:
            self._future.set_exception(_raisable(error))

    async def wait(self, hurry: Callable[[], None], limit_s: float | None = None) -> str:
        """Return the reason, or raise the error.

        If the calling task is cancelled, this calls `hurry`, waits at most `limit_s` seconds for
        the end, and then raises `CancelledError`. The error, if any, is its cause. A second
        cancellation stops the wait.
        """
        assert self._future is not None
        try:
            await asyncio.wait((self._future,))  # does not cancel the future
        except asyncio.CancelledError as cancelled:
            hurry()
            await asyncio.wait((self._future,), timeout=limit_s)
            raise cancelled from (self._future.exception() if self.reached else None)
        return self._future.result()


def _raisable(error: BaseException) -> Exception:
    """Return the error, or a replacement if the error would hang a task or end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    places = traceback.extract_tb(error.__traceback__)
    where = f" in {places[-1].filename}, line {places[-1].lineno}, in {places[-1].name}" if places else ""
    remedy = (
        "catch it there, where an iterator has ended; a trainer's batches must never end"
        if isinstance(error, StopIteration)
        else "raise an Exception there instead"
    )
    clear = EdgeAsyncError(f"your code raised {type(error).__name__}{where}; {remedy}")
    clear.__cause__ = error
    return clear
