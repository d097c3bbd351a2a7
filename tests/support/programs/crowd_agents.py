"""A program of thousands of agents in one process: the real agent, without its worker's thread.

Each agent holds the model and adds `shares_of` to it every now and then. The program reads commands, a line each:
`disconnected`, in place of thousands of socket monitors, and `finish`, after which no agent begins an update and
pending ones are answered.

    crowd_agents.py HUB COUNT PERIOD_S
"""

import asyncio
import json
import resource
import sys
import time
from random import Random

import uvloop
import zmq
from recording_agent import GROUPS, PLACES, shares_of  # beside this file, which is run as a program

from edgeasync.core.device.events import Trained
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.net.channel import Channel
from edgeasync.net.network import ZmqNetwork
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device
from edgeasync.runtime.workload import Workload

RECONNECT_MS = 500
"""How often a socket tries to connect: at ZeroMQ's 100 ms thousands of them leave a machine no time for a hub."""


class CrowdAgent(AgentRuntime):
    """An agent that trains without a thread, and learns from outside that its connection broke."""

    def __init__(self, crowd, number):
        section = AgentSection(hub=crowd.hub)
        identity = DeviceIdentity(f"crowd-{number}", f"{number:032x}", 1)
        super().__init__(
            AgentSettings(agent=section), Device(identity.device_id).open(identity, section),
            Workload(lambda _: None), on_report=self._note, network=crowd.network,
        )  # fmt: skip
        self.number = number
        self.made = self.answered = self.joins = 0
        self.joined_s = 0.0
        self.rejected = []
        self._crowd = crowd
        self._delays = Random(number)
        self._loop = asyncio.get_running_loop()
        self.training.train, self.training.run, self.training.submit = self.train, self.run_at_once, self.submit
        self._driver.begin()
        self.network.begin()
        self._done = self._loop.create_future()

    def begin(self):
        """Connect for the first time."""
        self._driver.do(self.engine.begin)

    def connect(self):
        """Connect a fresh socket."""
        self.disconnect()
        socket = self._crowd.network.context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.connect(self.address)
        self.network._channel = Channel(socket, self._loop, self.network.receive)

    def prepare(self, welcome):
        """Do nothing: there is no trainer."""

    def train(self, model, local_steps, then, **_):
        """Make the next update after a while."""
        if not self._crowd.finishing:
            delay_s = self._crowd.period_s * self._delays.uniform(0.5, 1.5)
            self._loop.call_later(delay_s, self._make, model, then)

    def _make(self, model, then):
        if not self._crowd.finishing:
            self.made += 1
            first = PLACES * (self.number % GROUPS)
            model.parameters[first : first + PLACES] += shares_of(self.made)
            self._driver.do(lambda: then(Trained(1, 1, 1.0, 0.0, self._crowd.period_s)))

    def submit(self, work):
        """Do the work at once."""
        self._loop.call_soon(self._driver.do, work)

    def run_at_once(self, work, then, *, brief=False):
        """Do the work at once, and then what follows from it."""
        self.submit(lambda: then(work()))

    def _note(self, report):
        if report.event == "answered":
            self.answered += 1
            if "applied" not in report.detail:
                self.rejected.append(report.detail)
        elif report.event == "joined":
            self.joins += 1
            self.joined_s = time.monotonic()
        elif report.event == "warning":
            self.rejected.append(report.detail)


class Crowd:
    """The agents, and the commands that they follow."""

    def __init__(self, hub, count, period_s):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.hub = hub
        self.period_s = period_s
        self.finishing = False
        self.network = ZmqNetwork()
        self.network.context.set(zmq.MAX_SOCKETS, 65_535)
        self.agents = [CrowdAgent(self, number) for number in range(count)]

    async def run(self):
        """Let all agents join and get an answer each, then say so; again whenever their connections broke."""
        for agent in self.agents:
            agent.begin()
            await asyncio.sleep(0)
        await self._all_joined(1)
        commands = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
        )
        rounds = 1
        while (line := (await commands.readline()).decode().strip()) == "disconnected":
            rounds += 1
            for agent in self.agents:
                agent._on_disconnected()
            await self._all_joined(rounds)
        assert line == "finish", line
        self.finishing = True
        await _until(lambda: all(agent.answered == agent.made for agent in self.agents))
        sums = [[0] * PLACES for _ in range(GROUPS)]
        for agent in self.agents:
            group = sums[agent.number % GROUPS]
            for k in range(1, agent.made + 1):
                group[:] = [a + b for a, b in zip(group, shares_of(k), strict=True)]
        rejected = [words for agent in self.agents for words in agent.rejected]
        answered = sum(agent.answered for agent in self.agents)
        _say("finished", sums=sums, rejected=rejected[:5], answered=answered)

    async def _all_joined(self, times):
        await _until(lambda: all(agent.joins >= times for agent in self.agents))
        joined_s = sorted(agent.joined_s for agent in self.agents)
        _say("all joined", joined_s=[joined_s[int(share * (len(joined_s) - 1))] for share in (0, 0.5, 0.99, 1)])
        before = [agent.answered for agent in self.agents]
        await _until(lambda: all(agent.answered > count for agent, count in zip(self.agents, before, strict=True)))
        _say("all answered")


async def _until(condition):
    while not condition():  # noqa: ASYNC110 - an event would be set for every one of thousands
        await asyncio.sleep(0.02)


def _say(event, **values):
    sys.stdout.write(json.dumps({"event": event} | values) + "\n")
    sys.stdout.flush()


async def main(hub, count, period_s):
    """Run a crowd."""
    await Crowd(hub, int(count), float(period_s)).run()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
