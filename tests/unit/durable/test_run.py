"""A run, once opened, holds its state for good, and a power cut takes none of it back."""

from random import Random

import pytest

from edgeasync.core.hub.events import Resumed
from edgeasync.core.recovery.log import write_entry
from edgeasync.core.recovery.state import capture
from edgeasync.errors import StorageError
from simulation.disk import SimulatedDisk
from tests.support.parts import runs


def open_run(disk):
    return runs.open_run(disk, segment_bytes_max=200)


def live(run, starts=4):
    """Journal starts, which are events that need no device, and write a checkpoint in the middle."""
    for number in range(starts):
        event = Resumed(f"{run._last + number:016x}")
        run.core.handle(event, 1.0)
        run.journal.append([(write_entry(event, 1.0, [], run.core.version, b""), None)])
        if number == 1:
            entry = run.journal.next_number - 1
            run.journal.drop_through(
                run.save(capture(run.core, run.model, run.publisher, entry, run.now_s), created_s=0.0)
            )
    return run


def died(seed, of, operation):
    """Return a disk on which a process was killed in an operation, or none if there were fewer."""
    disk = SimulatedDisk(seed)
    run = open_run(disk)
    disk.die_at(disk.count(of) + operation, lambda: None, of, power=False)
    live(run)
    if not disk.powerless:
        return None
    disk.crash()
    return disk


@pytest.mark.parametrize("of", ["names", "content"])
def test_what_an_open_run_holds_outlives_a_power_cut(of):
    """A killed process leaves contents and names that were not synced, and the next hub shows what it finds."""
    tried = 0
    for operation in range(1, 60):
        for seed in range(6):
            if (disk := died(seed, of, operation)) is None:
                continue
            tried += 1
            held = open_run(disk)
            disk.restore(disk.copy())
            disk.crash(Random(seed))
            found = open_run(disk)
            assert found.core.lineage == held.core.lineage, (operation, seed)
            assert (found._last, found.core.version) == (held._last, held.core.version)
    assert tried > 60


def test_a_run_that_cannot_be_secured_is_not_opened():
    disk = died(0, "names", 2)
    disk.read_only = True
    with pytest.raises(StorageError, match=r"cannot write to the run's folder: Read-only"):
        open_run(disk)
    disk.read_only = False
    open_run(disk)
