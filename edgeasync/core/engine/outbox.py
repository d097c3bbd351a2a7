"""Holds messages and reports until the log entries that they confirm are durable."""

from collections import deque
from collections.abc import Callable
from functools import partial

from edgeasync.core.hub.events import Peer
from edgeasync.core.recovery.log import Log
from edgeasync.protocol.wire import Buffer

Sender = Callable[[Peer, bytes, Buffer | None], None]


class Outbox:
    """Sends messages and shows reports, in order.

    Without a log, no message or report waits.
    """

    def __init__(self, send: Sender, log: Log | None) -> None:
        self._send = send
        self._log = log
        self._waiting: deque[tuple[int, Callable[[], None], bool]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, peer: Peer, header: bytes, payload: Buffer | None, *, confirms: bool) -> None:
        """Send a message in order; if it `confirms` an event, wait until the event is durable."""
        if self._waiting or (confirms and not self._is_durable):
            self._wait(partial(self._send, peer, header, payload))
        else:
            self._send(peer, header, payload)

    def show(self, action: Callable[[], None]) -> None:
        """Call `action`, which shows a report, once all log entries so far are durable.

        If the entries are lost, it is never called.
        """
        if self._waiting or not self._is_durable:
            self._wait(action)
        else:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` once all log entries so far are durable, or the log is abandoned."""
        if self._waiting or not self._is_durable:
            self._wait(action, always=True)
        else:
            action()

    @property
    def _is_durable(self) -> bool:
        return self._log is None or self._log.durable >= self._log.last

    def _wait(self, action: Callable[[], None], *, always: bool = False) -> None:
        assert self._log is not None
        self._waiting.append((self._log.last, action, always))
        self._log.commit()

    def end(self, action: Callable[[], None]) -> None:
        """Call `action` last, even if the log can no longer be written."""
        self.then(action)
        if self._log is not None and self._log.failing:
            self.abandon()

    def release(self) -> None:
        """Run the actions whose log entries are durable now."""
        assert self._log is not None
        waiting = self._waiting
        while waiting and waiting[0][0] <= self._log.durable:
            waiting.popleft()[1]()

    def abandon(self) -> None:
        """Drop waiting messages and reports, because the log can no longer be written."""
        waiting, self._waiting = self._waiting, deque()
        for _, action, always in waiting:
            if always:
                action()
