"""The processes of the durability benchmark: a start of the hub on a run's folder, and the disk by itself."""

import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.exchange_servers import LINEAGE, POLICY, Serve, make_settings, make_spec, serve_ours
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import SEGMENT_BYTES_MAX
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun

JOURNAL_ALONE = CheckpointSettings(every="1000 hours", journal_bytes_max=ByteCount(1 << 50))
"""No checkpoints but those at the beginning and the end."""

BACK_TO_BACK = CheckpointSettings(every="0.02 seconds")
"""The next checkpoint begins when the one before is written."""

PROBE_FILE = "probe"

RECOVERABLE = make_settings(durability="journal", checkpoint=JOURNAL_ALONE)
WITH_JOURNAL: Serve = partial(serve_ours, settings=make_settings(durability="journal"))
WITHOUT_JOURNAL: Serve = serve_ours
NEVER_RECOVERED: Serve = partial(serve_ours, settings=RECOVERABLE)
ALWAYS_SAVING: Serve = partial(serve_ours, settings=make_settings(checkpoint=BACK_TO_BACK))


def open_run(length: int, folder: str, pipe: "Connection[tuple[float, int, int], None]") -> None:
    """Recover a run that `NEVER_RECOVERED` made; tell how many seconds it took, its updates and its entries."""
    spec, settings = make_spec(length), RECOVERABLE.core_settings()

    run = HubRun(FolderDisk(Path(folder)), Rules(spec, POLICY, settings))
    begin_s = time.perf_counter()
    run.open(
        Rules.make_core,
        lambda: (np.zeros(length, np.float32), 0),
        lineage=LINEAGE,
        draw_session=lambda: bytes(16),
        created_s=0.0,
    )
    pipe.send((time.perf_counter() - begin_s, run.core.updates_applied, run.entries))


def write_and_sync_s(folder: str, nbytes: int, seconds: float) -> float:
    """Return the mean time that the disk takes to append and sync `nbytes`, repeated for `seconds`.

    The files are as long as segments of the journal.
    """
    disk = FolderDisk(Path(folder))
    content = np.random.default_rng(3).bytes(nbytes)
    file, length, count = disk.create(PROBE_FILE), 0, 0
    begin_s = time.perf_counter()
    try:
        while (elapsed_s := time.perf_counter() - begin_s) < seconds or not count:
            if length > SEGMENT_BYTES_MAX:
                file.close()
                file, length = disk.create(PROBE_FILE), 0
            file.write([content])
            file.sync()
            length += nbytes
            count += 1
    finally:
        file.close()
        disk.remove(PROBE_FILE)
    return elapsed_s / count
