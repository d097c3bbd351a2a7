"""A device that stays for the next run."""

import asyncio

import pytest

from edgeasync.core.device.effects import FINISHED
from edgeasync.runtime.run_after_run import RunAfterRun

pytestmark = pytest.mark.asyncio


class Told:
    """An agent that ends for this reason, or when it is asked to."""

    def __init__(self, reason):
        self.reason, self.asked = reason, asyncio.Event()

    async def run(self):
        if self.reason is None:
            await self.asked.wait()
        return self.reason or "stopped"

    def request_stop(self):
        self.asked.set()


async def test_run_after_run_each_has_an_agent_of_its_own():
    made = [Told(FINISHED), Told(FINISHED), Told("stopped")]
    agents, finished = iter(made), []
    runs = RunAfterRun(lambda: next(agents), lambda: finished.append(runs.agent), next_run_s=0.0)
    assert await runs.run() == "stopped"
    assert finished == made[:2]
    assert runs.agent is made[2]


@pytest.mark.parametrize("reason", [FINISHED, None], ids=["between two runs", "in a run"])
async def test_a_stop_ends_it_at_once(reason):
    runs = RunAfterRun(lambda: Told(reason), lambda: None, next_run_s=3600.0)
    running = asyncio.create_task(runs.run())
    await asyncio.sleep(0)
    runs.request_stop()
    assert await running == "stopped"


async def test_an_error_is_not_another_run():
    class Failing:
        async def run(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await RunAfterRun(Failing, lambda: None, next_run_s=0.0).run()
