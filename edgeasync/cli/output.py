"""What the commands print: one line an event, for people or, with `--json`, for scripts."""

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
"""The reader of a pipe has ended, or the terminal was closed."""


def visible(text: str) -> str:
    """Return text that a terminal only shows: control characters, which a peer may have written, as escapes."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or category(one) == "Zs" else _escaped(one) for one in text])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def tell(text: str) -> None:
    """Write an error to standard error, if that can be written: it may lie on a full disk."""
    if goes_to_journal(sys.stderr):
        text = with_priority(text, 3)
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")


class Printer:
    """Prints events to standard output, each as a line; a JSON object each if `json` is asked for."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.unread = False
        """Whether the reader has gone away; what else is printed goes to standard error."""
        self.lost = 0
        """How many events could not be printed since the last one that could."""

    def event(self, event: str, **details: Any) -> None:
        """Print one event; for people with date, time and offset, and without empty details.

        systemd's journal has a clock of its own: there a line begins with its priority instead.

        An event that cannot be written, as on a full disk, is no error: a hub or an agent must not end by its log.
        """
        lost = self.lost
        try:
            if lost:
                self._event("warning", {"detail": f"{lost} events before this one are late or missing"})
                self.lost = 0
            self._event(event, details)
        except OSError as error:
            self.lost += 1
            if not lost:
                tell(f"edgeasync: events cannot be printed: {error.strerror}; look at the disk of the log")

    def _event(self, event: str, details: Mapping[str, Any]) -> None:
        """Print one event; raises `OSError`."""
        if self.json:
            self._write(_encoded({"event": event, "time": round(time.time(), 3), **details}), priority_of(event))
        elif goes_to_journal(sys.stdout):
            self._write(event_words(event, details), priority_of(event))
        else:
            self._write(event_line(event, details))

    def object(self, value: object) -> None:
        """Print one JSON object on a line of its own."""
        self._write(_encoded(value))

    def result(self, value: Any, *lines: str) -> None:
        """Print one JSON object, or for people these lines."""
        if self.json:
            self.object(value)
            return
        for line in lines:
            self.line(line)

    def figures(self, event: str, figures: Mapping[str, Any], sentence: str) -> None:
        """Print one event with its figures, or for people with a sentence."""
        if self.json:
            self.event(event, **figures)
        else:
            self.event(event, detail=sentence)

    def line(self, text: str) -> None:
        """Print a line for people, without control characters."""
        self._write(visible(text))

    def _write(self, text: str, priority: Priority = 6) -> None:
        """Write a line at once; a reader that has gone away is no error."""
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
    """Return a line for people: date, time and offset, the event, and what is not empty of the details."""
    return f"{written(time.time())} {event_words(event, details)}"


def event_words(event: str, details: Mapping[str, Any]) -> str:
    """Return the event, and what is not empty of the details."""
    words = " ".join(f"{value}" for value in details.values() if value not in ("", None))
    return visible(f"{event:<12} {words}")


def _encoded(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(value))).decode()


def _as_text(value: Any) -> Any:
    """Return plain values with escapes for what is no text: a path may be of any bytes."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_as_text(key): _as_text(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_text(one) for one in value]
    return value


def print_table(printer: Printer, rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows, the first of them a header, in columns as wide as what they hold."""
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        printer.line("  ".join(cells).rstrip())
