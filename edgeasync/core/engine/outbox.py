"""The hub's outgoing messages. A message that confirms an event waits until the event's entry is durable."""

from collections import deque
from collections.abc import Callable

from edgeasync.core.hub.events import Peer
from edgeasync.core.recovery.log import Log
from edgeasync.protocol.wire import Buffer

Sender = Callable[[Peer, bytes, Buffer | None], None]


class Outbox:
    """Sends messages in order. Without a log no message waits."""

    def __init__(self, send: Sender, log: Log | None) -> None:
        self._send = send
        self._log = log
        self._waiting: deque[tuple[int, Callable[[], None] | tuple[Peer, bytes, Buffer | None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, peer: Peer, header: bytes, payload: Buffer | None, *, confirms: bool) -> None:
        """Send a message after those that wait; one that `confirms` an event waits until the log is durable."""
        log = self._log
        if log is None or not (self._waiting or (confirms and log.durable < log.last)):
            self._send(peer, header, payload)
            return
        self._waiting.append((log.last, (peer, header, payload)))
        log.commit()

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when all entries so far are durable and all messages so far have been sent."""
        log = self._log
        if log is None or not (self._waiting or log.durable < log.last):
            action()
            return
        self._waiting.append((log.last, action))
        log.commit()

    def end(self, action: Callable[[], None]) -> None:
        """Call `action` last of all, even if the log cannot be written any more."""
        self.then(action)
        if self._log is not None and self._log.failing:
            self.abandon()

    def release(self) -> None:
        """Send the messages, and call the actions, whose entries are durable by now."""
        assert self._log is not None
        waiting = self._waiting
        while waiting and waiting[0][0] <= self._log.durable:
            one = waiting.popleft()[1]
            if isinstance(one, tuple):
                self._send(*one)
            else:
                one()

    def abandon(self) -> None:
        """Drop the messages that wait but call the actions: the log cannot be written any more."""
        waiting, self._waiting = self._waiting, deque()
        for _, one in waiting:
            if not isinstance(one, tuple):
                one()
