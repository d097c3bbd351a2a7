"""Group commit: one sync for all entries that arrived during the previous sync.

A write starts only after the event loop has processed all messages that have already arrived.
Otherwise the first entry would be synced alone, and each later sync would cover the entries of only
about half of the devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from edgeasync.durable.journal import Appended, JournalWriter
from edgeasync.protocol.wire import Buffer

LAZY_BYTES_MAX = 1 << 16
"""Number of buffered bytes at which entries are written even if no message waits for them.

Below it, entries such as heartbeats are written together with later entries.
"""

RETRY_S = 0.5
"""Delay before a failed write is retried."""

Result = TypeVar("Result")


class CommitShell(Protocol):
    """The callbacks that a group commit needs from its shell."""

    def write_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the journal thread, in order, then call `then` on the event loop."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the event loop after `delay_s` seconds."""


class GroupCommit:
    """Implements `Log` with a journal. It buffers entries and retries failed writes.

    `on_durable` is called when more entries have become durable. `on_failing` is called with the
    reason when writes start to fail.
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
        """Number of successful writes. Each includes a sync."""
        self._writer = writer
        self._shell = shell
        self._on_durable = on_durable
        self._on_failing = on_failing
        self._waiting: list[Appended] = []
        self._waiting_bytes = 0
        self._wanted = self.last
        self._due = self._writing = self._closed = False

    def append(self, entry: bytes, payload: Buffer | None, checksum: int | None = None) -> None:
        """Buffer an entry. Its payload must not change after the call."""
        nbytes = len(entry) if payload is None else len(entry) + len(payload)
        self.last += 1
        self._waiting.append((entry, payload, checksum))
        self._waiting_bytes += nbytes
        self.bytes_waiting += nbytes
        self.bytes_appended += nbytes
        if self._waiting_bytes > LAZY_BYTES_MAX:
            self.commit()

    def commit(self) -> None:
        """Schedule a write of all buffered entries.

        The write starts after the event loop has processed all messages that have already arrived,
        and includes their entries.
        """
        self._wanted = self.last
        if not (self._due or self._writing or self.failing):
            self._due = True
            self._shell.after(0.0, self._begin)

    def drop_through(self, number: int) -> None:
        """Remove entries that a checkpoint covers. Failures are ignored."""
        self._shell.write_in_background(partial(self._drop, number), lambda _: None)

    def close(self) -> None:
        """Start no more writes, and close the journal's file after the current write."""
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

    def _write(self, batch: list[Appended]) -> str:
        """Write and sync a batch in the background; return an error message, or an empty string."""
        try:
            self._writer.append(batch)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _drop(self, number: int) -> None:
        try:
            self._writer.drop_through(number)
        except OSError:
            return  # retried after the next checkpoint

    def _written(self, batch: list[Appended], nbytes: int, trouble: str) -> None:
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
