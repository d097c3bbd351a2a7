"""What systemd tells a process that it starts, by the environment variables of sd_notify(3) and systemd.exec(5).

These are the only environment variables that edgeasync reads, and no other module reads them.
"""

import contextlib
import os
from typing import Literal, TextIO

from edgeasync.host.notify import Notifier

Priority = Literal[3, 4, 6]
"""Of syslog: error, warning, information."""

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
"""Events that somebody should look at."""


def find_notifier() -> Notifier:
    """Return what speaks to systemd, or to nobody if systemd did not start this process as `Type=notify`."""
    address, usec = os.environ.get("NOTIFY_SOCKET", ""), os.environ.get("WATCHDOG_USEC", "")
    ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return Notifier(address, int(usec) / 1e6 if ours and usec.isdecimal() and int(usec) else None)


def goes_to_journal(stream: TextIO | None) -> bool:
    """Return whether what is written to a stream goes to systemd's journal, which stamps each line itself."""
    named = os.environ.get("JOURNAL_STREAM")
    if not named or stream is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(stream.fileno())
        return named == f"{found.st_dev}:{found.st_ino}"
    return False


def with_priority(text: str, priority: Priority) -> str:
    """Return lines for the journal, each with its priority."""
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def priority_of(event: str) -> Priority:
    """Return how much an event matters."""
    return 4 if event in WARNINGS else 6
