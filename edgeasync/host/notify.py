"""Notify systemd, from a service of `Type=notify`, that it is ready and alive, and of its status."""

import contextlib
import socket

JOINED, AWAY = "joined", "looks for"
"""First words of an agent's status, which precede its hub's address.

An upgrade waits until the status begins with `JOINED`.
"""

HUBLESS = "without a hub:"
"""First words of a peer's status. An upgrade of a peer waits until its status begins with them."""


class Notifier:
    """Sends notifications to systemd's socket.

    The socket's address is a path, or `@` followed by an abstract name. Without an address, nothing
    is sent. `watchdog_s` is the number of seconds after which systemd's watchdog kills a service
    that has not called `alive`; it is `None` without a watchdog. Socket errors are ignored, because
    a service must not end if systemd is busy.
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
        """Report to systemd's watchdog that the service does not hang."""
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
