"""Base class of objects that are run with `with`, `async with`, or `start` and `stop`."""

import asyncio
import concurrent.futures
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.host.at_exit import EXIT_S, OwnThread, stop_at_exit
from edgeasync.host.event_loop import check_threads, loop_factory
from edgeasync.sdk.blocking import INTERRUPT_S
from edgeasync.sdk.termination import exit_on_sigterm

LOG = logging.getLogger("edgeasync.service")

Result = TypeVar("Result")

CALL_S = 10.0
"""Maximum time in seconds that a call from another thread waits for the loop."""


class Service(ABC):
    """Base of `Hub`, `Agent` and `Peer`; each object runs once.

    `async with` runs the service on the caller's event loop; `with` and `start` run it in a thread
    with its own loop. All three wait until the service is ready. At the end of the block, or when
    the program exits, the service is requested to stop, and the caller waits until it has ended.
    All methods may be called from any thread.
    """

    _afterwards = ""
    """Advice appended to the error that a call raises after the service has ended."""

    def __init__(self) -> None:
        # Completed when the service is ready, or has ended.
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: OwnThread | None = None
        self._stopping = self._forked = False

    @abstractmethod
    async def _serve(self) -> str:
        """Run the service; call `_note_ready` when it is ready, and return why it ended."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Make `_serve` return soon; called on the loop."""

    # -- on the caller's loop --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        exit_on_sigterm()
        self._begin()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        try:
            await asyncio.shield(asyncio.wrap_future(self._ready))
            self._raise_failure()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        assert self._task is not None
        await asyncio.wait([self._task])
        if error is None:
            self._done.result()

    async def wait_async(self) -> str:
        """Wait until the service ends; return why it ended, or raise its error."""
        return await asyncio.shield(asyncio.wrap_future(self._done))  # a cancelled wait must not cancel `_done`

    # -- in a thread -----------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Run the service in a thread; return when it is ready, or raise its error if it fails.

        An interrupt stops the service and is raised again.
        """
        self._begin()

        def work() -> None:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._run())

        self._thread = OwnThread(f"edgeasync-{_name(self)}", work)
        self._thread.start()
        exit_on_sigterm()
        try:
            self._await_ready()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        concurrent.futures.wait([self._done])
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._done.result()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the service ends; return why it ended, or raise its error.

        Raises `TimeoutError` if the service is still running after `timeout_s`. An interrupt
        (Ctrl-C) stops the service and is raised again.
        """
        self._check_may_wait("wait", "write `await {0}.wait_async()`")
        if self._in_callback:
            raise ConfigError(
                "wait() would never return in a callback, because it would wait for that callback: return, or "
                f"raise callbacks.StopTraining to end the {_name(self)}"
            )
        if self._loop is None and self._thread is None:
            raise EdgeAsyncError(f"this {type(self).__name__} has not started: call start() before wait()")
        try:
            concurrent.futures.wait([self._done], timeout_s)
            if not self._done.done():
                raise TimeoutError(f"this {type(self).__name__} still runs after {timeout_s:g} s")
            return self._done.result()
        except KeyboardInterrupt:
            self.stop()
            concurrent.futures.wait([self._done], INTERRUPT_S)
            raise

    def stop(self) -> None:
        """Request that the service ends; do nothing if it has not started or has already ended."""
        self._stopping = True
        self._on_loop(self._request_stop)

    # -- for subclasses --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        check_threads()
        if self._loop is not None or self._thread is not None:
            raise EdgeAsyncError(f"this {type(self).__name__} has already run; create another one to run again")
        stop_at_exit(self._done, self._stop_with_program, self._forget)

    def _stop_with_program(self) -> None:
        """Stop the service when the program exits; if its loop has stopped, run the loop again."""
        self.stop()
        loop, task = self._loop, self._task
        if loop is None or task is None or loop.is_running():
            return
        name = type(self).__name__
        if loop.is_closed():
            LOG.error("the loop of this %s was closed while it ran; leave `async with` first", name)
            self._abandon()
            self._done.set_result("its loop was closed")
            return
        LOG.warning("the loop of this %s stopped while it ran; leave `async with` before the program ends", name)
        with contextlib.suppress(RuntimeError):  # another thread is running the loop
            loop.run_until_complete(asyncio.wait([task], timeout=EXIT_S))

    def _abandon(self) -> None:  # noqa: B027 - optional
        """Write unsaved state to disk, because without a loop the service cannot end cleanly."""

    def _forget(self) -> None:
        """Mark the service as ended in a forked child, where the parent's threads do not exist."""
        self._ready, self._done = concurrent.futures.Future(), concurrent.futures.Future()
        self._ready.set_result(None)
        self._done.set_result("it runs in the process that forked this one")
        self._forked = True

    def _await_ready(self) -> None:
        """Wait, in the thread that called `start`, until the service is ready or has failed."""
        self._ready.result()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the error with which the service has ended, if any."""
        if self._done.done():
            self._done.result()

    @property
    def _in_callback(self) -> bool:
        """Whether this is called from one of the service's callbacks."""
        return False

    @property
    def _is_here(self) -> bool:
        """Whether this is called on the service's event loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _check_may_wait(self, what: str, instead: str) -> None:
        """Raise `ConfigError` if waiting would block the service's own loop; `instead` is advice."""
        if self._is_here:
            raise ConfigError(
                f"{what}() would block the loop that this {_name(self)} runs on: {instead.format(_name(self))}"
            )

    def _on_loop(self, action: Callable[[], None]) -> None:
        """Call `action` soon on the loop; do nothing if the service has not started or has ended."""
        if self._loop is not None and not self._done.done():
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(action)

    def _note_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    async def _run(self) -> None:
        try:
            self._done.set_result(await self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            told = isinstance(error, asyncio.CancelledError) or not self._ready.done()  # `start` raises it
            LOG.log(logging.INFO if told else logging.ERROR, "ended: %r", error)
            self._done.set_exception(error)
        self._note_ready()  # so that nobody keeps waiting

    def _late(self) -> EdgeAsyncError:
        """Return the error for a call after the service has ended, or in a forked child."""
        if self._forked:
            name = type(self).__name__
            return EdgeAsyncError(
                f"this {name} runs in the parent process: call it there, or create another {name} here"
            )
        return EdgeAsyncError(f"this {type(self).__name__} has ended{self._afterwards}")

    def _call(self, function: Callable[[], Result]) -> Result:
        """Call `function` on the loop and return its result.

        Raises `EdgeAsyncError` if the service is not running.
        """
        loop = self._loop
        if self._done.done():
            raise self._late()
        if loop is None or not self._ready.done():
            raise EdgeAsyncError(
                f"this {type(self).__name__} is not running; use it inside `with` or after start()"
            )
        if self._is_here:
            return function()
        result: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the caller
                result.set_exception(error)

        loop.call_soon_threadsafe(call)
        return result.result(CALL_S)


def _name(service: Service) -> str:
    return type(service).__name__.lower()
