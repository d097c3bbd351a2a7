"""Train in one run after another: when a run ends, wait for the hub's next run."""

import asyncio
from collections.abc import Callable

from edgeasync.core.device.effects import FINISHED
from edgeasync.runtime.agent import AgentRuntime

NEXT_RUN_S = 10.0
"""Seconds after a run's end until the device contacts its hub again. A finished hub takes a while
to exit.
"""


class RunAfterRun:
    """Creates an agent with `make_agent` for each run, and runs it until that run ends.

    If an agent ends for another reason, no further agent is created. `on_finished` is called after
    each run.
    """

    def __init__(
        self,
        make_agent: Callable[[], AgentRuntime],
        on_finished: Callable[[], None],
        next_run_s: float = NEXT_RUN_S,
    ) -> None:
        self._make_agent = make_agent
        self._on_finished = on_finished
        self._next_run_s = next_run_s
        self._stopped = asyncio.Event()
        self.agent = make_agent()
        """The agent of the current run or, between two runs, of the last run."""

    async def run(self) -> str:
        """Train in one run after another; return why the last agent ended."""
        while (reason := await self.agent.run()) == FINISHED:
            self._on_finished()
            try:
                async with asyncio.timeout(self._next_run_s):
                    await self._stopped.wait()
            except TimeoutError:
                self.agent = self._make_agent()
            else:
                return "stopped"
        return reason

    def request_stop(self) -> None:
        """Make `run` return soon. Call it on the event loop."""
        self._stopped.set()
        self.agent.request_stop()

    def last_events(self) -> list[str]:
        """Return one line per recent event and effect of the core. The lines contain no secrets."""
        return self.agent.last_events()
