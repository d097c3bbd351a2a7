"""What a service of `Type=notify` tells systemd: that it is ready, how it does, and that it is still alive."""

import contextlib
import socket

JOINED, AWAY = "joined", "looks for"
"""How an agent's status begins, before its hub's address; an upgrade waits for the first of them."""

HUBLESS = "without a hub:"
"""How a peer's status begins; an upgrade waits for this one, too."""


class Notifier:
    """Sends to systemd's socket, a path or `@` and an abstract name; sends nothing without an address.

    `watchdog_s` is how long systemd waits for a sign of life; `None` if it does not wait for any. That nobody
    reads the socket is no error: a service must not end because its supervisor is busy.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else None
        self._status = ""

    def ready(self) -> None:
        """Tell that the service has started."""
        self._send("READY=1")

    def status(self, sentence: str) -> None:
        """Tell how the service does, in words for `systemctl status`, if these are new ones."""
        if sentence != self._status:
            self._status = sentence
            self._send("STATUS=" + " ".join(sentence.split()))

    def alive(self) -> None:
        """Tell that the service does not hang."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Tell that the service is about to end."""
        self._send("STOPPING=1")

    def _send(self, line: str) -> None:
        if self._address:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            ):
                sender.setblocking(False)
                sender.sendto(line.encode(errors="replace"), self._address)
