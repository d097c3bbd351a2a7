"""A board without a clock of its own, and one whose card must not be written to."""

import re
import signal
import time

import pytest

from edgeasync.core.recovery.log import read_entry
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import JournalReading
from tests.support.boards.disk_faults import STRACE, needs_strace
from tests.support.programs.processes import status_when, trained
from tests.support.size import repetitions

pytestmark = pytest.mark.process

DAY_S = 86_400
PROGRAM = """
import time
from pathlib import Path

real, offset = time.time, Path({offset!r})
time.time = lambda: real() + float(offset.read_text())
from edgeasync.cli.main import main
main()
"""
WRITES = "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,fallocate,ftruncate,truncate"
TO_A_FILE = re.compile(r"(?:" + WRITES.replace(",", "|") + r")\(\d+<(/[^>]+)>")


class WallClock:
    """The wall clock of processes that are started by its `program`; it can jump."""

    def __init__(self, folder, offset_s):
        self._file = folder / "offset"
        self.jump(offset_s)
        self.program = ("-c", PROGRAM.format(offset=str(self._file)))

    def jump(self, offset_s):
        fresh = self._file.with_name("fresh")
        fresh.write_text(str(offset_s))
        fresh.rename(self._file)


@pytest.mark.parametrize(
    ("at_start_s", "running_s"), [(-30 * DAY_S, DAY_S), (DAY_S, -30 * DAY_S)], ids=["back", "ahead"]
)
def test_a_wall_clock_that_jumps_costs_no_lease_and_no_order(commands, at_start_s, running_s):
    clock = WallClock(commands.folder, at_start_s)
    settings = commands.settings(hub="quiet = false")
    hub, address = commands.hub(settings, program=clock.program)
    agents = [commands.agent(address, name, program=clock.program) for name in ("a", "b")]
    before = status_when(address, lambda status: status["updates_applied"] >= 10)["updates_applied"]
    clock.jump(running_s)
    status_when(address, lambda status: status["updates_applied"] >= before + 20)
    assert not {"lost", "rejoined", "reconnected"} & set(hub.names())
    assert [agent.names().count("joined") for agent in agents] == [1, 1]
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0

    def times_s(after):
        found = JournalReading(FolderDisk(commands.folder / "run-hub"), after=after).records()
        return [read_entry(record.entry).now_s for record in found]

    first_s = times_s(0)
    clock.jump(at_start_s)
    again, _ = commands.hub(settings, "--bind", address, program=clock.program)
    trained(address, 20)
    assert not {"lost", "rejoined"} & set(again.names())
    again.signal(signal.SIGTERM)
    assert again.wait() == 0
    clock.jump(0)
    second_s = times_s(len(first_s))
    assert min(len(first_s), len(second_s)) > 20
    assert first_s + second_s == sorted(first_s + second_s)
    assert 0.0 <= first_s[0] <= second_s[-1] < 3600.0


@needs_strace
def test_an_agent_that_trains_writes_nothing(commands):
    """For a few seconds here, for ten minutes at size nightly."""
    trace = commands.folder / "trace"
    _, address = commands.hub(commands.settings(hub="quiet = false"))
    under = (STRACE, "-f", "-y", "-qq", "-e", f"trace={WRITES}", "-o", str(trace))
    agent = commands.agent(address, "quiet", under=under)
    agent.wait_for("joined")
    begun = len(trace.read_text().splitlines())
    until_s = time.monotonic() + repetitions("seconds without a write")
    while time.monotonic() < until_s:
        trained(address, 10, "quiet")
    lines = trace.read_text().splitlines()[begun:]
    assert not [line for line in lines if (found := TO_A_FILE.search(line)) and not found[1].startswith("/dev/")]
    assert not agent.ended
