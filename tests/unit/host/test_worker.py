"""A worker thread that outlives its event loop."""

import threading

import pytest

from edgeasync.host.worker import Worker
from tests.support.parts.hubs import fail
from tests.support.programs.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio


async def test_work_that_outlasts_its_loop_ends_quietly():
    """The loop is closed by the time the work is done: there is nobody to hand its result or its error to."""
    told, going_on = [], threading.Event()
    worker = Worker("evaluate", told.append)
    worker.start()
    worker.submit(going_on.wait)
    worker.submit(lambda: fail(RuntimeError("the loop is closed")))
    worker.abandon()
    going_on.set()
    worker._thread.join(PATIENCE_S)
    assert told == []
