"""Ends what still runs when the program ends, before Python takes the threads away.

A thread that returns from native code into an interpreter that is shut down aborts the process, and what was still
to be written would not be on disk.
"""

import concurrent.futures.thread  # before `_stop_all` is registered: Python calls that first, executors end later
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
"""How long the end of the program waits for all of it."""

Done = concurrent.futures.Future[Any]


class OwnThread(threading.Thread):
    """A daemon thread, so that it keeps no program alive; one that ends waits for it, up to `EXIT_S`."""

    def __init__(self, name: str, target: Callable[..., object], *args: object) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        _threads.add(self)


_threads: WeakSet[OwnThread] = WeakSet()
_running: dict[Done, tuple[Callable[[], None], Callable[[], None]]] = {}
_ending = False


def is_ending() -> bool:
    """Return whether the program ends: its main thread has."""
    return _ending


def stop_at_exit(done: Done, stop: Callable[[], None], forget: Callable[[], None]) -> None:
    """Call `stop` if the program ends before this is `done`, and wait for that.

    A forked child, which has none of these threads, calls `forget` instead. Raises `EdgeAsyncError` if the program
    ends already.
    """
    if _ending:
        raise EdgeAsyncError(
            "the program is ending, and nothing can be started any more; let its main thread wait for this one, "
            "by Thread.join for example"
        )
    _running[done] = stop, forget
    done.add_done_callback(lambda done: _running.pop(done, None))


def _stop_all() -> None:
    """Stop all, and wait until nothing runs and all threads have ended."""
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
        LOG.warning("the program ends, but these threads still run after %g s: %s", EXIT_S, ", ".join(late))


def _forget_all() -> None:
    for _, forget in _running.values():
        forget()
    _running.clear()


# `atexit` would be too late: by then executors take no work, and an end needs them.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]  # noqa: SLF001
os.register_at_fork(after_in_child=_forget_all)
