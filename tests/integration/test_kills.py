"""Hub and agents killed at random moments, and at chosen system calls: nothing acknowledged is lost or doubled."""

import pytest

from tests.support.boards.disk_faults import injecting, needs_strace
from tests.support.programs.kills import EXACT, OFTEN, SELDOM, Fleet, kill_hubs
from tests.support.size import repetitions

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("policy", "checkpoint"), [(EXACT, SELDOM), ("", SELDOM)], ids=["exact", "default policy"]
)
def test_every_acknowledged_update_counts_once_and_training_goes_on(commands, policy, checkpoint):
    kills = repetitions("kills of a hub")
    seen = kill_hubs(commands, kills, processes=4, devices=2, policy=policy, checkpoint=checkpoint)
    assert seen["updates_acknowledged"] > 10 * kills
    assert seen["hashes_checked"] >= seen["updates_acknowledged"]
    assert seen["statuses"] >= 2 * kills


RENAMES, REMOVALS = "rename,renameat,renameat2", "unlink,unlinkat"
WRITES, SYNCS = "writev,pwritev2", "fdatasync,pwritev2"
CALLS = [
    (WRITES, 3), (SYNCS, 1), ("fsync", 2), (RENAMES, 1), (REMOVALS, 1),
    (WRITES, 1), (WRITES, 20), (SYNCS, 2), (SYNCS, 20), ("fsync", 5), (RENAMES, 2),
]  # fmt: skip


@needs_strace
def test_a_hub_killed_at_any_call_to_its_disk_loses_nothing(commands):
    fleet = Fleet(commands, processes=1, devices=3, checkpoint=OFTEN)
    fleet.start_hub()
    fleet.wait_for_answers(3, since_s=0.0)
    for calls, count in CALLS[: repetitions("calls to a disk at which a hub is killed")]:
        fleet.hub.kill()
        fleet.start_hub(under=injecting(calls, f"signal=SIGKILL:when={count}"))
        fleet.hub.wait()
        fleet.copy()
        fleet.check_copy()
    fleet.start_hub()
    fleet.wait_for_answers(3)
    fleet.stop()
