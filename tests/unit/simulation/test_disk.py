"""The simulator's disk: what it forgets, and what it must not."""

import errno
from random import Random

import pytest

from simulation.disk import SECTOR_BYTES, SimulatedDisk


def written(disk, name, *parts, sync=True):
    file = disk.create(name)
    file.write(parts)
    if sync:
        file.sync()
    return file


@pytest.mark.parametrize("seed", range(200))
def test_what_was_synced_outlives_a_power_cut(seed):
    random = Random(seed)
    disk = SimulatedDisk(seed)
    file = written(disk, "a", random.randbytes(random.randint(0, 2000)))
    disk.sync_folder()
    synced = disk.read("a")
    file.write([random.randbytes(random.randint(0, 3000))])
    file.write([random.randbytes(random.randint(0, 3000))])
    seen = disk.read("a")
    disk.crash()
    left = disk.read("a")
    assert left.startswith(synced)
    assert len(left) <= len(seen)
    disk.crash()
    assert disk.read("a") == left, "what is left is on the disk"


def test_a_power_cut_tears_loses_keeps_and_mixes():
    kinds = set()
    for seed in range(300):
        disk = SimulatedDisk(seed)
        file = written(disk, "a", b"s" * 100)
        disk.sync_folder()
        data = Random(seed).randbytes(5 * SECTOR_BYTES)
        file.write([data[:700]])
        file.write([data[700:]])
        disk.crash()
        left = bytes(disk.read("a"))[100:]
        if left == data:
            kinds.add("all")
        elif not left:
            kinds.add("nothing")
        elif data.startswith(left):
            kinds.add("torn")
        else:
            sector = slice(SECTOR_BYTES - 100, 2 * SECTOR_BYTES - 100)
            lost = left[sector] and left[sector] != data[sector]
            kinds.add("a later page without an earlier one" if lost and any(left[sector.stop :]) else "pages lost")
            kinds.add("zeros" if not any(left[sector]) else "garbage")
    assert kinds >= {
        "all", "nothing", "torn", "a later page without an earlier one", "pages lost", "zeros", "garbage",
    }  # fmt: skip


def test_synced_names_outlive_a_power_cut_though_content_need_not():
    lost = 0
    for seed in range(50):
        disk = SimulatedDisk(seed)
        written(disk, "a.part", b"content", sync=False)
        disk.rename("a.part", "a")
        disk.sync_folder()
        disk.crash()
        assert disk.names() == ["a"]
        lost += disk.read("a") != b"content"
    assert lost > 10


def test_a_failed_sync_leaves_in_doubt_what_no_later_one_makes_sure():
    lost = kept = 0
    for seed in range(100):
        disk = SimulatedDisk(seed)
        file = written(disk, "a", b"first")
        disk.sync_folder()
        disk.failing_syncs = 1
        file.write([b"doubt"])
        with pytest.raises(OSError) as raised:
            file.sync()
        assert raised.value.errno == errno.EIO
        file.write([b"third"])
        file.sync()
        disk.crash()
        left = bytes(disk.read("a"))
        assert left.startswith(b"first")
        assert left.endswith(b"third")
        kept += left == b"firstdoubtthird"
        lost += left != b"firstdoubtthird"
    assert kept > 20
    assert lost > 10


def test_a_failed_write_may_have_written_a_part():
    sizes = set()
    for seed in range(50):
        disk = SimulatedDisk(seed)
        disk.failing_writes = 1
        with pytest.raises(OSError):
            written(disk, "a", b"12345")
        sizes.add(disk.size("a"))
    assert sizes == set(range(6))


CUT = {1: {b"old"}, 2: {b"old"}, 3: {b"old"}, 4: {b"old", b"new"}, 5: {b"old", b"new"}, 6: {b"new"}}


@pytest.mark.parametrize("operation", CUT)
def test_power_can_fail_in_the_middle_of_anything(operation):
    """Whatever is done when it fails, a file that is replaced is the old one or the new one."""
    left = set()
    for seed in range(40):
        disk = SimulatedDisk(seed)
        written(disk, "a", b"old")
        disk.sync_folder()
        cuts = []
        disk.die_at(disk.operations + operation, lambda cuts=cuts: cuts.append(1), power=True)
        written(disk, "a.part", b"new")
        disk.rename("a.part", "a")
        disk.sync_folder()
        written(disk, "b", b"another")
        assert cuts == [1]
        assert disk.powerless
        assert disk.read("a") == b"new", "the dead process sees what it believes"
        disk.crash()
        assert not disk.powerless
        left.add(bytes(disk.read("a")))
        assert "b" not in disk.names() or operation == 6
    assert left == CUT[operation]


def test_a_killed_process_leaves_what_it_had_written():
    lengths = set()
    for seed in range(100):
        disk = SimulatedDisk(seed)
        file = written(disk, "a", b"not synced, ", sync=False)
        disk.die_at(disk.operations + 1, lambda: None, power=False)
        file.write([b"whole"])
        file.sync()
        assert disk.read("a") == b"not synced, whole", "the dead process sees what it believes"
        disk.crash()
        left = disk.read("a")
        assert b"not synced, whole".startswith(left)
        assert left.startswith(b"not synced, ")
        lengths.add(len(left))
    assert lengths == set(range(12, 18))
