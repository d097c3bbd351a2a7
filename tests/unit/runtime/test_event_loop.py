"""Which event loop is taken: uvloop where it is installed, unless it would abort the process."""

import asyncio
import os
import subprocess
import sys

import pytest
import uvloop

from edgeasync.runtime import event_loop

PROGRAM = """
import asyncio
from edgeasync.runtime.event_loop import loop_factory

async def main():
    await asyncio.sleep(0)

with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(main())
    print(type(runner.get_loop()).__module__)
"""


@pytest.mark.parametrize(
    ("closed", "module"), [((), "uvloop"), ((0,), "asyncio.unix_events")], ids=["open", "closed"]
)
def test_a_process_without_standard_input_has_another_loop_than_uvloop_and_ends_well(closed, module):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: [os.close(descriptor) for descriptor in closed],
    )
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, module, "")


def test_without_uvloop_there_is_asyncios_own(monkeypatch):
    assert event_loop.loop_factory() is uvloop.new_event_loop
    monkeypatch.setattr(event_loop, "_uvloop", None)
    with asyncio.Runner(loop_factory=event_loop.loop_factory()) as runner:
        assert not isinstance(runner.get_loop(), uvloop.Loop)
