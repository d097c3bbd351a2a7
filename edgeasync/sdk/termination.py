"""SIGTERM ends a program as `sys.exit` does, so that what runs in its threads writes its last state.

By default Python dies at once. Then the last version of a hub that keeps no journal is lost, and so are the last
steps of agents.
"""

import os
import signal
import threading
import weakref
from typing import Protocol

END_S = 10.0
"""How long all services together may take to end."""


class Ending(Protocol):
    """Something that runs in a thread."""

    def stop(self) -> None:
        """Ask it to end."""

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, for a while."""


_RUNNING: weakref.WeakSet[Ending] = weakref.WeakSet()


def end_with_the_program(service: Ending) -> None:
    """Let SIGTERM end a service first. A handler of the program's own is left alone."""
    _RUNNING.add(service)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _: object) -> None:
    running = [*_RUNNING]
    for service in running:
        service.stop()
    for service in running:
        service.join(END_S / len(running))
    raise SystemExit(128 + number)


def _forget() -> None:
    """Let a forked child die by SIGTERM as before: it has none of the threads."""
    _RUNNING.clear()
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
