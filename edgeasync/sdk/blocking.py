"""Runs coroutines from synchronous code, even in a notebook, where a loop is already running."""

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from edgeasync.config import suggest
from edgeasync.host.at_exit import OwnThread, is_ending
from edgeasync.host.event_loop import check_threads, loop_factory
from edgeasync.sdk.termination import exit_on_sigterm

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

INTERRUPT_S = 10.0
"""Maximum time in seconds that an interrupt waits for a clean shutdown."""


def blocking(
    function: Callable[Parameters, Coroutine[Any, Any, Result]], name: str
) -> Callable[Parameters, Result]:
    """Wrap a coroutine function as a blocking function with the same signature and docstring."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:  # report it under this function's name, with advice
            unknown = [name for name in kwargs if name not in signature.parameters]
            advice = f"; {suggest(unknown[0], signature.parameters)}" if unknown else ""
            raise TypeError(f"{name}() {error}{advice}".rstrip("; ")) from None
        return run_blocking(partial(function, *args, **kwargs))

    call.__name__ = call.__qualname__ = name
    return call


def run_blocking(make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine that `make` returns in a thread with its own loop; return its result.

    An interrupt (Ctrl-C, or a notebook's stop button) cancels the coroutine, waits until it has
    shut down, and is then raised again. A second interrupt is raised without waiting. If the
    program exits while the coroutine runs, the coroutine is cancelled and `SystemExit` is raised.
    """
    check_threads()
    exit_on_sigterm()
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()
    begun: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]]
    begun = concurrent.futures.Future()

    async def main() -> Result:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await make()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                result = runner.run(main())
        except BaseException as error:  # noqa: BLE001 - raised again by `done.result()`
            done.set_exception(error)
        else:
            done.set_result(result)

    thread = OwnThread("edgeasync-run", work)
    thread.start()
    try:
        return done.result()
    except asyncio.CancelledError:
        if is_ending():
            raise SystemExit from None  # ends the caller's thread without a traceback
        raise
    except KeyboardInterrupt:
        loop, task = begun.result()
        if task is not None and not done.done():
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([done], INTERRUPT_S)
        raise
    finally:
        if done.done():
            thread.join()
