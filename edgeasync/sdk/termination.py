"""Makes SIGTERM end a program like `sys.exit`, so that hubs and agents save their state.

By default, Python exits at once on SIGTERM. A hub without a journal would then lose its newest
version, and agents would lose their last steps.
"""

import os
import signal
import threading

FORK_S = 0.05
"""Delay in seconds after which a signal that arrived during a fork is sent again."""


def exit_on_sigterm() -> None:
    """Make SIGTERM end the program like `sys.exit`, unless a handler is already installed.

    Only the main thread can do this; in other threads the call does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> None:
    if _forking.is_set():  # Python discards exceptions raised in a fork hook
        threading.Timer(FORK_S, os.kill, (os.getpid(), number)).start()
        return
    raise SystemExit(128 + number)


_forking = threading.Event()


def _begin_fork() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        _forking.set()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _end_fork() -> None:
    if _forking.is_set():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _forking.clear()


def _die_as_usual() -> None:
    """Restore the default effect of SIGTERM in a forked child, even if a signal has arrived."""
    if _forking.is_set():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _forking.clear()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_die_as_usual)
