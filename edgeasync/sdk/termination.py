"""SIGTERM ends a program as `sys.exit` does, so that what runs in its threads writes its last state.

By default Python dies at once. Then the last version of a hub that keeps no journal is lost, and so are the last
steps of agents.
"""

import os
import signal
import threading

FORK_S = 0.05
"""How long after a fork a signal is sent again that came during it."""


def exit_on_sigterm() -> None:
    """Let SIGTERM end the program like `sys.exit`, if this is its main thread and it has no handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> None:
    if _forking.is_set():  # Python drops what is raised in a hook of a fork
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
    """Let a forked child die by SIGTERM as without us, also if the signal has come already."""
    if _forking.is_set():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _forking.clear()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_die_as_usual)
