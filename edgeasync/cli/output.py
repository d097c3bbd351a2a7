"""What the commands print: one line an event, for people or, with `--json`, for scripts."""

import sys
import time
from typing import Any

import msgspec


class Printer:
    """Prints events to standard output, each as a line; a JSON object each if `json` is asked for."""

    def __init__(self, *, json: bool) -> None:
        self.json = json

    def event(self, event: str, **details: Any) -> None:
        """Print one event; empty details are left out for people."""
        if self.json:
            self.object({"event": event, "time": round(time.time(), 3), **details})
            return
        words = " ".join(f"{value}" for value in details.values() if value not in ("", None))
        self.line(f"{time.strftime('%H:%M:%S')} {event:<12} {words}")

    def object(self, value: object) -> None:
        """Print one JSON object on a line of its own."""
        self.line(msgspec.json.encode(value).decode())

    def line(self, text: str) -> None:
        """Print a line at once; a reader that has gone away is no error."""
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            sys.stdout = sys.stderr
