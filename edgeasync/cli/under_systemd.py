"""Environment variables that systemd sets for its services: sd_notify(3) and systemd.exec(5).

No other module of edgeasync reads environment variables.
"""

import contextlib
import os
from typing import Literal, TextIO

from edgeasync.host.notify import Notifier

Priority = Literal[3, 4, 6]
"""Syslog priorities: error, warning, information."""

WARNINGS = frozenset(
    {
        "warning",
        "unreachable",
        "disconnected",
        "quarantined",
        "alarm",
        "lost",
        "paused",
        "not_writing",
        "unexpected",
    }
)
"""Events that an operator should notice."""


def find_notifier() -> Notifier:
    """Return systemd's notifier; it does nothing unless this process is a service of `Type=notify`."""
    address, usec = os.environ.get("NOTIFY_SOCKET", ""), os.environ.get("WATCHDOG_USEC", "")
    ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return Notifier(address, int(usec) / 1e6 if ours and usec.isdecimal() and int(usec) else None)


def goes_to_journal(stream: TextIO | None) -> bool:
    """Return whether a stream is connected to systemd's journal, which adds time stamps itself."""
    named = os.environ.get("JOURNAL_STREAM")
    if not named or stream is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(stream.fileno())
        return named == f"{found.st_dev}:{found.st_ino}"
    return False


def with_priority(text: str, priority: Priority) -> str:
    """Prefix each line with its priority for the journal."""
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def priority_of(event: str) -> Priority:
    """Return the syslog priority of an event."""
    return 4 if event in WARNINGS else 6
