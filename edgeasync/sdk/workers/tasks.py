"""`engine="tasks"`: workers as coroutines of this process, each with its own training thread."""

import secrets
from collections.abc import Sequence
from typing import Self

from edgeasync.net.network import ZmqNetwork
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from edgeasync.sdk.workers.base import Job, Workers, incarnation_of, note_worker, run_together, worker_name
from edgeasync.training.trainer import Trainer


class TaskWorkers(Workers):
    """Workers as agents connected by ZeroMQ's in-process transport."""

    def __init__(self, trainers: Sequence[Trainer], examples: Sequence[int]) -> None:
        self.bind = f"inproc://{secrets.token_hex(8)}"
        self._trainers = trainers
        self._examples = examples
        self._agents: list[AgentRuntime] = []
        self._stopping = False

    async def __aenter__(self) -> Self:
        """Create the network that the hub and the agents share."""
        self.network = ZmqNetwork()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the network."""
        assert self.network is not None
        self.network.close()

    async def run(self, hub: HubRuntime) -> None:
        """Run one agent per trainer."""
        if self._stopping:
            return
        for number, (trainer, examples) in enumerate(zip(self._trainers, self._examples, strict=True), 1):
            incarnation = incarnation_of(hub, number)
            job = Job(number=number, address=self.bind, incarnation=incarnation, seed=0, examples=examples)
            self._agents.append(job.make_agent(trainer, self.network))
        await run_together(_run(agent, worker_name(number)) for number, agent in enumerate(self._agents, 1))

    def stop(self) -> None:
        """Stop every agent, including those that have not joined yet."""
        self._stopping = True
        for agent in self._agents:
            agent.request_stop()


async def _run(agent: AgentRuntime, name: str) -> None:
    try:
        await agent.run()
    except Exception as error:
        note_worker(error, name)
        raise
