"""Values that are read from files, and read again when the files change."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from edgeasync.errors import EdgeAsyncError
from edgeasync.host.file_watch import stamp_of

CHECK_S = 1.0
"""Minimum seconds between two looks at the files."""

Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """A value from files, which is checked only when somebody asks for it. Use it on the event loop.

    `read` returns the value or raises an `EdgeAsyncError`. Then `on_error` gets the error once, and
    returns the value to use until `read` succeeds; its argument is the value until now.
    """

    def __init__(
        self,
        value: Value,
        files: Sequence[Path],
        read: Callable[[], Value],
        on_error: Callable[[EdgeAsyncError, Value], Value],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._value = value
        self._files = files
        self._read = read
        self._on_error = on_error
        self._clock = clock
        self._stamps: object = None
        """What the files looked like when they were read; `None` to read them in any case."""
        self._due_s = 0.0
        self._told = ""

    def __call__(self) -> Value:
        """Return the value. It may be a second old."""
        if self._clock() >= self._due_s:
            self._due_s = self._clock() + CHECK_S
            stamps = [stamp_of(file) for file in self._files]
            if stamps != self._stamps:
                self._reload(stamps)
        return self._value

    def _reload(self, stamps: object) -> None:
        try:
            self._value, self._stamps, self._told = self._read(), stamps, ""
        except EdgeAsyncError as error:
            self._stamps = None  # its permissions, which are no part of a stamp, may be the reason
            if str(error) != self._told:
                self._told = str(error)
                self._value = self._on_error(error, self._value)
