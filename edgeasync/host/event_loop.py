"""Which event loop hubs and agents run on: uvloop where it is installed and works. And which threads they need."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable

from edgeasync.errors import ConfigError

_uvloop: Callable[[], asyncio.AbstractEventLoop] | None = None
with contextlib.suppress(ImportError):  # it has no wheel for some machines
    from uvloop import new_event_loop as _uvloop


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes an event loop, `None` for asyncio's own.

    Without standard input, output or error, a descriptor of the loop may get its number. uvloop then aborts the
    process when it closes that, so such a process has asyncio's loop.
    """
    return _uvloop if _has_standard_streams() else None


def check_threads() -> None:
    """Raise `ConfigError` if a library has replaced Python's threads or queues: ours would wait for ever."""
    for replaced, own in (
        (threading.get_ident, "_thread"),
        (threading.Lock, "_thread"),
        (queue.SimpleQueue, "_queue"),
    ):
        if replaced.__module__ != own:
            library = replaced.__module__.partition(".")[0]
            raise ConfigError(
                f"{library} has replaced Python's threads or queues, and edgeasync needs Python's own; run it in "
                f"a process that {library} does not patch, or let it patch neither (with gevent: "
                "monkey.patch_all(thread=False, queue=False))"
            )


def _has_standard_streams() -> bool:
    """Return whether the numbers of standard input, output and error are taken."""
    try:
        for descriptor in range(3):
            os.fstat(descriptor)
    except OSError:
        return False
    return True
