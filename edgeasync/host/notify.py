"""Notify systemd from a service of `Type=notify`: ready, status, and still alive."""

import contextlib
import socket

JOINED, AWAY = "joined", "looks for"
"""The first word of an agent's status, before its hub's address; an upgrade waits for `JOINED`."""

HUBLESS = "without a hub:"
"""The beginning of a peer's status, for which an upgrade waits, too."""


class Notifier:
    """Sends to systemd's socket, a path or `@` and an abstract name.

    Without an address, it sends nothing. `watchdog_s` is how long systemd waits for a sign of life;
    `None` without a watchdog. Errors of the socket are ignored, because a service must not end when
    its supervisor is busy.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else None
        self._status = ""

    def ready(self) -> None:
        """Report that the service has started."""
        self._send("READY=1")

    def status(self, sentence: str) -> None:
        """Report the service's status for `systemctl status`, if it has changed."""
        if sentence != self._status:
            self._status = sentence
            self._send("STATUS=" + " ".join(sentence.split()))

    def alive(self) -> None:
        """Report that the service does not hang."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the service is about to end."""
        self._send("STOPPING=1")

    def _send(self, line: str) -> None:
        if self._address:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            ):
                sender.setblocking(False)
                sender.sendto(line.encode(errors="replace"), self._address)
