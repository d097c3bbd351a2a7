"""Store a device's daily byte count on disk, so that a restart does not reset the daily quota."""

import contextlib
import time
from collections.abc import Callable

from edgeasync.core.device.data_quota import DataQuota, QuotaRecord
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import StorageError
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.host.worker import Worker


class QuotaKeeper:
    """Writes the byte count in a separate thread, because the training thread may be busy.

    The agent calls `begin` and `keep` on its event loop. `close` blocks, so the agent calls it in
    another thread. The writing thread calls `warn` with a message, and `fail` with an unexpected
    error.
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
        self._disk = DiskWatch(warn, "a restart loses the latest part of the daily byte count")

    def begin(self) -> None:
        """Load the count that was stored before a restart, and start the thread; raises `StorageError`."""
        self._quota.recall(self._file.read())
        self._worker.start()

    def keep(self, record: QuotaRecord) -> None:
        """Write the byte count in the background."""
        self._worker.submit(lambda: self._disk.write(lambda: self._file.write(record)))

    def close(self, timeout_s: float) -> None:
        """Write the final byte count. If the thread hangs, give up after `timeout_s` seconds."""
        if self._worker.close(timeout_s):
            with contextlib.suppress(StorageError):
                self._file.write(self._quota.record(time.monotonic()))
