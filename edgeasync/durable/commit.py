"""Group commit: one sync for all entries that came in while the one before was running.

A write begins only when the loop has received all that is there already. Else the first entry would be synced
alone, the others after it, and each sync would have about half of the devices in it.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from edgeasync.durable.journal import JournalWriter
from edgeasync.protocol.wire import Buffer

LAZY_BYTES_MAX = 1 << 16
"""Entries that nobody waits for, such as those of heartbeats, are written with others, or from this size on."""

RETRY_S = 0.5
"""How long a disk that fails is left alone."""

Result = TypeVar("Result")


class CommitShell(Protocol):
    """What a group commit needs done in the world."""

    def write_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the thread that writes the journal, in order, then call `then` on the loop."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the loop in `delay_s` seconds."""


class GroupCommit:
    """A `Log` on a journal. What cannot be written is kept, and written again until it can be.

    `on_durable` is called when more entries are durable, `on_failing` when the first write fails: with the reason.
    """

    def __init__(
        self,
        writer: JournalWriter,
        shell: CommitShell,
        *,
        on_durable: Callable[[], None],
        on_failing: Callable[[str], None],
    ) -> None:
        self.last = self.durable = writer.next_number - 1
        self.failing = ""
        self.bytes_appended = self.bytes_waiting = 0
        self.batches = 0
        """Writes, each with a sync, that succeeded."""
        self._writer = writer
        self._shell = shell
        self._on_durable = on_durable
        self._on_failing = on_failing
        self._waiting: list[tuple[bytes, Buffer | None]] = []
        self._waiting_bytes = 0
        self._wanted = self.last
        self._due = self._writing = self._closed = False

    def append(self, entry: bytes, payload: Buffer | None) -> None:
        """Take an entry in; its payload must not change."""
        nbytes = len(entry) if payload is None else len(entry) + len(payload)
        self.last += 1
        self._waiting.append((entry, payload))
        self._waiting_bytes += nbytes
        self.bytes_waiting += nbytes
        self.bytes_appended += nbytes
        if self._waiting_bytes > LAZY_BYTES_MAX:
            self.commit()

    def commit(self) -> None:
        """Make every entry so far durable as soon as can be, with those of messages that are there already."""
        self._wanted = self.last
        if not (self._due or self._writing or self.failing):
            self._due = True
            self._shell.after(0.0, self._begin)

    def drop_through(self, number: int) -> None:
        """Let go of what a checkpoint covers; best effort."""
        self._shell.write_in_background(partial(self._drop, number), lambda _: None)

    def close(self) -> None:
        """Write nothing more, and close the journal's file behind what is being written."""
        self._closed = True
        self._shell.write_in_background(self._writer.close, lambda _: None)

    def _begin(self) -> None:
        self._due = False
        if self._closed or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        nbytes, self._waiting_bytes = self._waiting_bytes, 0
        self._writing = True
        self._shell.write_in_background(partial(self._write, batch), partial(self._written, batch, nbytes))

    def _write(self, batch: list[tuple[bytes, Buffer | None]]) -> str:
        """Write and sync, in the background; return what went wrong."""
        try:
            self._writer.append(batch)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _drop(self, number: int) -> None:
        try:
            self._writer.drop_through(number)
        except OSError:
            return  # they go with the next checkpoint

    def _written(self, batch: list[tuple[bytes, Buffer | None]], nbytes: int, trouble: str) -> None:
        self._writing = False
        if trouble:
            self._waiting = batch + self._waiting
            self._waiting_bytes += nbytes
            begun, self.failing = not self.failing, trouble
            if begun:
                self._on_failing(trouble)
            self._shell.after(RETRY_S, self._begin)
            return
        self.batches += 1
        self.durable += len(batch)
        self.bytes_waiting -= nbytes
        self.failing = ""
        self._on_durable()
        if self._wanted > self.durable:
            self.commit()
