"""Which event loop hubs and agents run on: uvloop where it is installed and works."""

import asyncio
import contextlib
import os
from collections.abc import Callable

_uvloop: Callable[[], asyncio.AbstractEventLoop] | None = None
with contextlib.suppress(ImportError):  # it has no wheel for some machines
    from uvloop import new_event_loop as _uvloop


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes an event loop, `None` for asyncio's own.

    Without standard input, output or error, a descriptor of the loop may get its number. uvloop then aborts the
    process when it closes that, so such a process has asyncio's loop.
    """
    return _uvloop if _has_standard_streams() else None


def _has_standard_streams() -> bool:
    """Return whether the numbers of standard input, output and error are taken."""
    try:
        for descriptor in range(3):
            os.fstat(descriptor)
    except OSError:
        return False
    return True
