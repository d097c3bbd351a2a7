"""Select the event loop of hubs and agents, and check that Python's threads are usable."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable

from edgeasync.errors import ConfigError

_uvloop: Callable[[], asyncio.AbstractEventLoop] | None = None
with contextlib.suppress(ImportError):  # uvloop has no wheel for some machines
    from uvloop import new_event_loop as _uvloop


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return a function that creates an event loop, or `None` for asyncio's default.

    If standard input, output or error is closed, the event loop may open a file descriptor with the
    same number (0, 1 or 2). uvloop would abort the process when it closes this descriptor, so such
    a process uses asyncio's event loop.
    """
    return _uvloop if _has_standard_streams() else None


def check_threads() -> None:
    """Raise `ConfigError` if a library has replaced Python's threads or queues.

    The replacements could block.
    """
    for replaced, own in (
        (threading.get_ident, "_thread"),
        (threading.Lock, "_thread"),
        (queue.SimpleQueue, "_queue"),
    ):
        if replaced.__module__ != own:
            library = replaced.__module__.partition(".")[0]
            raise ConfigError(
                f"{library} has replaced Python's threads or queues, which edgeasync needs; use a process that "
                f"{library} does not patch, or exclude both from patching (with gevent: "
                "monkey.patch_all(thread=False, queue=False))"
            )


def _has_standard_streams() -> bool:
    """Return whether standard input, output and error are open."""
    try:
        for descriptor in range(3):
            os.fstat(descriptor)
    except OSError:
        return False
    return True
