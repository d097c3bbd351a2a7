"""SIGTERM ends a program as `sys.exit` does, so that what runs in its threads writes its last state.

By default Python dies at once. Then the last version of a hub that keeps no journal is lost, and so are the last
steps of agents.
"""

import os
import signal
import threading
from typing import NoReturn


def exit_on_sigterm() -> None:
    """Let SIGTERM end the program like `sys.exit`. A handler of the program's own is left alone."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _hold() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _die_as_usual() -> None:
    """Let a forked child die by SIGTERM as without us, also if the signal has come already."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_die_as_usual)
