"""When the program ends, stop running hubs, agents and threads before Python stops its threads.

Otherwise, a thread that returns from native code after the interpreter has shut down would abort
the process, and pending data would not be written to disk.
"""

import concurrent.futures.thread  # imported before `_stop_all` is registered, so that executors end after it
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from edgeasync.errors import EdgeAsyncError

LOG = logging.getLogger("edgeasync.exit")

EXIT_S = 10.0
"""Maximum seconds that an ending program waits until all hubs, agents and threads have stopped."""

Done = concurrent.futures.Future[Any]


class OwnThread(threading.Thread):
    """A daemon thread, which does not prevent the program from ending.

    An ending program waits up to `EXIT_S` for the thread to end.
    """

    def __init__(self, name: str, target: Callable[..., object], *args: object) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        _threads.add(self)


_threads: WeakSet[OwnThread] = WeakSet()
_running: dict[Done, tuple[Callable[[], None], Callable[[], None]]] = {}
_ending = False


def is_ending() -> bool:
    """Return whether the program is ending, that is, whether its main thread has ended."""
    return _ending


def stop_at_exit(done: Done, stop: Callable[[], None], forget: Callable[[], None]) -> None:
    """If the program ends before `done` is done, call `stop` and wait for `done`.

    In a forked child process, which does not contain these threads, `forget` is called instead.
    Raises `EdgeAsyncError` if the program is already ending.
    """
    if _ending:
        raise EdgeAsyncError(
            "cannot start, because the program is ending; let its main thread wait for this thread, for example "
            "with Thread.join"
        )
    _running[done] = stop, forget
    done.add_done_callback(lambda done: _running.pop(done, None))


def _stop_all() -> None:
    """Stop all running hubs, agents and threads, and wait until the threads have ended."""
    global _ending
    _ending, until_s = True, time.monotonic() + EXIT_S
    running = dict(_running)
    for stop, _ in running.values():
        stop()
    concurrent.futures.wait(running, EXIT_S)
    for thread in tuple(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until_s - time.monotonic()))
    if late := sorted({thread.name for thread in _threads if thread.is_alive()}):
        LOG.warning(
            "the program ends, but these threads are still running after %g s: %s", EXIT_S, ", ".join(late)
        )


def _forget_all() -> None:
    for _, forget in _running.values():
        forget()
    _running.clear()


# `atexit` would be too late, because executors reject work by then, and stopping needs them.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]  # noqa: SLF001
os.register_at_fork(after_in_child=_forget_all)
