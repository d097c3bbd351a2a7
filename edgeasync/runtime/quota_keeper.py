"""The count of the bytes of a device's day, kept on disk so that a restart does not begin another day."""

import contextlib
import time
from collections.abc import Callable

from edgeasync.core.device.data_quota import DataQuota, QuotaRecord
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import StorageError
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.host.worker import Worker


class QuotaKeeper:
    """Writes the count in a thread of its own: the one that trains may be busy for minutes.

    The agent calls `begin` and `keep` on its loop. `close` waits for the thread, so the agent calls it in another.
    `warn` and `fail` are called in the thread: with a sentence, and with an error that must not happen.
    """

    def __init__(
        self,
        file: QuotaFile,
        data_quota: DataQuota,
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._file = file
        self._quota = data_quota
        self._worker = Worker("quota", fail)
        self._disk = DiskWatch(warn, "a restart forgets bytes of the day")

    def begin(self) -> None:
        """Continue the day of an earlier start, and start the thread; raises `StorageError`."""
        self._quota.recall(self._file.read())
        self._worker.start()

    def keep(self, record: QuotaRecord) -> None:
        """Write the count soon."""
        self._worker.submit(lambda: self._disk.write(lambda: self._file.write(record)))

    def close(self, timeout_s: float) -> None:
        """Keep the count of a device that stops, to the byte, unless the thread hangs."""
        if self._worker.close(timeout_s):
            with contextlib.suppress(StorageError):
                self._file.write(self._quota.record(time.monotonic()))
