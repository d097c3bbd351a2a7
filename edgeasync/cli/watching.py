"""`edgeasync status --watch`: shows a status every second."""

import sys
import time
from collections.abc import Callable
from typing import Any

from edgeasync.cli.output import Printer, visible
from edgeasync.errors import HubUnreachableError

WATCH_S = 1.0
"""Seconds between two requests. A hub makes at most one status a second for all that watch."""

CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Clears a terminal and its scrollback."""


def watch_status(
    fetch: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    address: str,
    printer: Printer,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Pass the status that `fetch` returns to `show`, every second, until nobody reads the output.

    A terminal is cleared before each status. While the hub does not answer, the last status stays,
    with a line about the hub below.
    """
    seen = False
    while not printer.unread:
        try:
            status = fetch()
            if sys.stdout.isatty() and not printer.json:
                sys.stdout.write(CLEAR)
            show(status)
            seen = True
        except HubUnreachableError:
            if not seen:
                raise
            if not printer.json:
                printer.line(f"{visible(address)} does not answer; trying again")
        sleep(WATCH_S)
