"""Output of the commands: one line per event, as text or, with `--json`, as JSON."""

import contextlib
import errno
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import category

import msgspec

from edgeasync.cli.under_systemd import Priority, goes_to_journal, priority_of, with_priority
from edgeasync.host.wall_clock import written

GONE = (errno.EPIPE, errno.EIO)
"""Error numbers of a closed pipe or terminal."""


def visible(text: str) -> str:
    """Return text with control characters escaped. Text from peers may contain escape sequences."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or category(one) == "Zs" else _escaped(one) for one in text])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def tell(text: str) -> None:
    """Write an error to standard error. Ignores write errors, such as a full disk."""
    if goes_to_journal(sys.stderr):
        text = with_priority(text, 3)
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")


class Printer:
    """Prints events to standard output, one per line; as JSON objects if `json` is set."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.unread = False
        """Whether the reader has closed standard output; later output goes to standard error."""
        self.lost = 0
        """Number of events that failed to print since the last success."""

    def event(self, event: str, **details: Any) -> None:
        """Print one event. Text lines start with date, time and offset, and omit empty details.

        In systemd's journal, which adds its own time stamps, a line starts with its priority
        instead. If an event cannot be written, for example because the disk is full, no error is
        raised. So a full disk does not end a hub or agent.
        """
        lost = self.lost
        try:
            if lost:
                self._event("warning", {"detail": f"{lost} earlier events were delayed or lost"})
                self.lost = 0
            self._event(event, details)
        except OSError as error:
            self.lost += 1
            if not lost:
                tell(f"edgeasync: cannot print events: {error.strerror}; check the disk that stores the log")

    def _event(self, event: str, details: Mapping[str, Any]) -> None:
        """Print one event. Raises `OSError`."""
        if self.json:
            self._write(_encoded({"event": event, "time": round(time.time(), 3), **details}), priority_of(event))
        elif goes_to_journal(sys.stdout):
            self._write(event_words(event, details), priority_of(event))
        else:
            self._write(event_line(event, details))

    def object(self, value: object) -> None:
        """Print one JSON object on its own line."""
        self._write(_encoded(value))

    def result(self, value: Any, *lines: str) -> None:
        """Print `value` as JSON, or `lines` as text."""
        if self.json:
            self.object(value)
            return
        for line in lines:
            self.line(line)

    def figures(self, event: str, figures: msgspec.Struct, sentence: str) -> None:
        """Print one event, with `figures` as JSON or with `sentence` as text."""
        if self.json:
            self.event(event, **msgspec.to_builtins(figures))
        else:
            self.event(event, detail=sentence)

    def line(self, text: str) -> None:
        """Print a text line with control characters escaped."""
        self._write(visible(text))

    def _write(self, text: str, priority: Priority = 6) -> None:
        """Write and flush a line. If the reader has closed standard output, continue on standard error."""
        if goes_to_journal(sys.stdout):
            text = with_priority(text, priority)
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError as error:
            if error.errno not in GONE:
                raise
            sys.stdout = sys.stderr
            self.unread = True


def event_line(event: str, details: Mapping[str, Any]) -> str:
    """Return a text line: date, time and offset, the event, and its non-empty details."""
    return f"{written(time.time())} {event_words(event, details)}"


def event_words(event: str, details: Mapping[str, Any]) -> str:
    """Return the event and its non-empty details as text."""
    words = " ".join(f"{value}" for value in details.values() if value not in ("", None))
    return visible(f"{event:<12} {words}")


def _encoded(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(value))).decode()


def _as_text(value: Any) -> Any:
    """Escape invalid Unicode in a value, recursively. Paths may contain any bytes."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_as_text(key): _as_text(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_text(one) for one in value]
    return value


def remark_lines(warnings: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Return a line for each warning, then one for each note."""
    return [*[f"warning: {said}" for said in warnings], *[f"note: {said}" for said in notes]]


def print_table(printer: Printer, rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns that are as wide as their widest cell. The first row is the header."""
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        printer.line("  ".join(cells).rstrip())
