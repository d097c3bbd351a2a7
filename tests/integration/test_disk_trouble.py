"""Disks that fail, fill up or become read-only: the hub says so and waits; nothing acknowledged is lost."""

import signal
import time

import pytest

from edgeasync.errors import StorageError
from edgeasync.net.status import fetch_status
from tests.support.boards.disk_faults import injecting, needs_strace
from tests.support.programs.kills import Fleet
from tests.support.programs.processes import LIVELINESS, PATIENCE_S, free_address, status_when, trained

pytestmark = pytest.mark.process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_log_on_a_full_disk_harms_no_hub(commands, number):
    """Nor an agent: both work on, and end when they are told to."""
    address, full = free_address(), ("sh", "-c", 'exec "$@" > /dev/full', "sh")
    hub = commands.start("hub", commands.settings(bind=address), "--json", under=full)
    agent = commands.agent(address, "pi-1", under=full)
    status_when(address, lambda status: status["updates_applied"] > 3, "updates")
    for service in (agent, hub):
        service.signal(number)
        assert service.wait() == 0
        told = "edgeasync: cannot print events: No space left on device; check the disk that stores the log\n"
        assert service.stderr == told
    assert (commands.folder / "run-hub" / "model.safetensors").exists()


def wait_until_all_train(fleet):
    """Wait until the status, and so what is on disk, says that all devices train."""

    def all_train(status):
        return [device["state"] for device in status["devices"]] == ["training"] * fleet.count

    status_when(fleet.address, all_train, "devices that train")


def assert_waits(fleet, since=0):
    """Wait until the hub says that its disk is in trouble; check that it answers nothing and that all live on."""
    assert "cannot be written" in fleet.hub.wait_for("not_writing", since=since)["detail"]
    status_when(fleet.address, lambda status: status["disk_trouble"], "trouble with the disk")
    fleet.stories.read()
    before = fleet.stories.acknowledged
    # Devices that ask are told to try again, for longer than a lease, and no device is lost.
    time.sleep(1.2 * 3.0)
    status = fetch_status(fleet.address, PATIENCE_S)
    assert status["disk_trouble"]
    assert {device["state"] for device in status["devices"]} == {"training"}  # as it was on disk
    fleet.stories.read()
    assert fleet.stories.acknowledged == before
    assert "lost" not in fleet.hub.names()
    return status


def assert_goes_on(fleet, since=0):
    """Wait until the hub writes again and all have answers; no device was lost, or had to say hello again."""
    fleet.hub.wait_for("writing", since=since)
    fleet.wait_for_answers(3)
    # Where syncs fail now and then, one may just have failed again.
    status_when(fleet.address, lambda status: not status["disk_trouble"], "a disk that can be written")
    assert "lost" not in fleet.hub.names()
    assert not [story.name for story in fleet.stories.all if story.told_of("disconnected")]


def kill_and_check(fleet):
    fleet.hub.close()
    fleet.copy()
    fleet.check_copy()
    fleet.start_hub()
    fleet.wait_for_answers()
    fleet.stop()


@needs_strace
@pytest.mark.parametrize("call", ["fdatasync,pwritev2", "writev,pwritev2"])
def test_a_disk_that_fails_for_a_while_costs_time_and_no_update(commands, call):
    fleet = Fleet(commands, processes=1, devices=3)
    # Each try costs one call, and half a second: some five seconds of trouble, longer than a lease.
    fleet.start_hub(under=injecting(call, "error=EIO:when=200..210"))
    wait_until_all_train(fleet)
    assert_waits(fleet)
    assert_goes_on(fleet)
    kill_and_check(fleet)


def test_a_folder_that_is_moved_is_missed_until_it_is_back(commands):
    fleet = Fleet(commands, processes=1, devices=3)
    fleet.start_hub()
    wait_until_all_train(fleet)
    away = fleet.folder.with_name("away")
    fleet.folder.rename(away)
    assert_waits(fleet)
    assert not fleet.folder.exists()
    away.rename(fleet.folder)
    assert_goes_on(fleet)
    kill_and_check(fleet)


def test_a_full_disk_costs_time_and_no_update(commands, small_disk):
    fleet = Fleet(commands, processes=1, devices=3)
    fleet.start_hub()
    wait_until_all_train(fleet)
    filler = small_disk.fill()
    assert "space" in assert_waits(fleet)["disk_trouble"]
    small_disk.remount("size=16m")
    assert_goes_on(fleet)
    filler.unlink()
    kill_and_check(fleet)


@needs_strace
def test_a_disk_that_becomes_read_only_costs_time_and_no_update(commands, small_disk):
    fleet = Fleet(commands, processes=1, devices=3)
    # Now and then a sync fails, so that the hub has to begin another file.
    fleet.start_hub(under=injecting("fdatasync,pwritev2", "error=EIO:when=60+60"))
    fleet.wait_for_answers(3, since_s=0.0)
    wait_until_all_train(fleet)
    small_disk.cover()
    status_when(fleet.address, lambda status: "Read-only" in status["disk_trouble"], "a read-only disk")
    assert_waits(fleet)
    since = len(fleet.hub.events)
    small_disk.uncover()
    assert_goes_on(fleet, since)
    kill_and_check(fleet)


def test_a_hub_that_is_stopped_on_a_full_disk_says_so_and_ends(commands, small_disk):
    fleet = Fleet(commands, processes=1, devices=3)
    fleet.start_hub()
    fleet.wait_for_answers(3, since_s=0.0)
    small_disk.fill()
    fleet.hub.wait_for("not_writing")
    fleet.hub.signal(signal.SIGTERM)
    assert fleet.hub.wait() == StorageError.exit_code, str(fleet.hub)
    assert len(fleet.hub.stderr.splitlines()) == 1
    assert "not written within" not in fleet.hub.stderr, "it waited for its disk to the end of its patience"
    assert "Traceback" not in fleet.hub.stderr

    # Nor does a hub start there until there is space: what the last one left may not be on the disk yet.
    fleet.start_hub()
    assert fleet.hub.wait() == StorageError.exit_code, str(fleet.hub)
    assert "No space left" in fleet.hub.stderr
    assert len(fleet.hub.stderr.splitlines()) == 1
    small_disk.remount("size=16m")
    fleet.start_hub()
    fleet.wait_for_answers(3)
    kill_and_check(fleet)


def test_a_hub_is_not_started_where_nothing_can_be_written(commands, small_disk):
    small_disk.cover()
    hub = commands.start("hub", commands.settings(), "--json")
    assert hub.wait() == StorageError.exit_code
    assert "read-only" in hub.stderr.lower()
    assert len(hub.stderr.splitlines()) == 1


def test_a_hub_with_checkpoints_alone_says_that_none_can_be_written(commands):
    more = '[checkpoint]\nevery = "5 updates"\n' + LIVELINESS
    hub, address = commands.hub(commands.settings(hub='durability = "checkpoint"', more=more))
    commands.agent(address, "pi-1")
    trained(address)
    folder = commands.folder / "run-hub"
    away = folder.with_name("away")
    folder.rename(away)
    saved = status_when(address, lambda status: status["disk_trouble"], "trouble with the disk")["version_durable"]
    status = trained(address)
    assert status["version_durable"] == saved < status["version"]
    away.rename(folder)
    status_when(address, lambda status: not status["disk_trouble"], "a disk that can be written")
    assert not hub.ended
