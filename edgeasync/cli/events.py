"""`edgeasync events`: prints the latest events of a running hub, and follows them."""

import time
from collections.abc import Callable

from edgeasync.cli.output import Printer, event_words
from edgeasync.errors import HubUnreachableError
from edgeasync.host.wall_clock import written
from edgeasync.protocol.status import RecentEvent, RecentEventList

FOLLOW_S = 1.0
"""Seconds between two requests."""


class EventsPrinter:
    """Prints the events of a hub, each once, also across restarts of the hub.

    `fetch` requests the events after a number.
    """

    def __init__(self, fetch: Callable[[int], RecentEventList], printer: Printer) -> None:
        self._fetch = fetch
        self._printer = printer
        self._lineage = ""
        self._last = 0

    def print_new(self) -> None:
        """Print the events since the last call. Raises the errors of `fetch`."""
        found = self._fetch(self._last)
        if self._lineage and found.lineage != self._lineage:  # the hub has been restarted
            found = self._fetch(0)
        if found.missed and self._lineage and not self._printer.json:
            self._printer.line(f"{found.missed} events are missing: the hub keeps only the latest")
        self._lineage, self._last = found.lineage, found.last
        for event in found.events:
            self._print(event)

    def follow(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Print events as they happen, until nobody reads the output.

        While the hub does not answer, wait for it.
        """
        self.print_new()
        while not self._printer.unread:
            sleep(FOLLOW_S)
            try:
                self.print_new()
            except HubUnreachableError:
                continue

    def _print(self, event: RecentEvent) -> None:
        if self._printer.json:
            self._printer.object(event)
        else:
            words = event_words(event.event, {"device": event.device, "detail": event.detail})
            self._printer.line(f"{written(event.time)} {words}")
