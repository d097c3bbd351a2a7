"""How a hub or an agent ends: once, and by an error that a task can raise, whatever the code of others raised."""

import asyncio
import traceback
from collections.abc import Callable

from edgeasync.errors import EdgeAsyncError


class Completion:
    """The reason or the error that something on an event loop ends with, `of` a class of this name.

    The first one given counts. From `begin` on it is used on the loop only.
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
        """Whether a reason or an error was given."""
        return self._future is not None and self._future.done()

    def begin(self) -> None:
        """Let it run from now on; raises `EdgeAsyncError` the second time."""
        if self.begun:
            raise EdgeAsyncError(f"{self._of}.run() was called before; make another {self._of} to run again")
        self._future = asyncio.get_running_loop().create_future()

    def reach(self, reason: str) -> None:
        """End well."""
        assert self._future is not None
        if not self.reached:
            self._future.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End by an error; one that a task cannot raise is wrapped in an `EdgeAsyncError`."""
        assert self._future is not None
        if not self.reached:
            self._future.set_exception(_raisable(error))

    async def wait(self, hurry: Callable[[], None], limit_s: float | None = None) -> str:
        """Return the reason, or raise the error.

        Cancelled meanwhile, it calls `hurry`, waits for the end all the same, up to `limit_s` seconds if given,
        and raises `CancelledError`, its cause the error if there is one. Cancelled once more, it waits no longer.
        """
        assert self._future is not None
        try:
            await asyncio.wait((self._future,))  # which does not cancel it
        except asyncio.CancelledError as cancelled:
            hurry()
            await asyncio.wait((self._future,), timeout=limit_s)
            raise cancelled from (self._future.exception() if self.reached else None)
        return self._future.result()


def _raisable(error: BaseException) -> Exception:
    """Return the error, or what stands for one that would hang a task, pass for its cancelling or end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    places = traceback.extract_tb(error.__traceback__)
    where = f" in {places[-1].filename}, line {places[-1].lineno}, in {places[-1].name}" if places else ""
    remedy = (
        "something that is read there has come to its end: catch that there; a trainer's batches must never end"
        if isinstance(error, StopIteration)
        else "raise an Exception there instead"
    )
    clear = EdgeAsyncError(f"code that was given to edgeasync raised {type(error).__name__}{where}; {remedy}")
    clear.__cause__ = error
    return clear
