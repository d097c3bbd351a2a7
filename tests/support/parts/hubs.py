"""Hubs and agents in this process, with a trainer that adds one."""

import asyncio
import threading

import numpy as np
import pytest

from edgeasync import StepResult
from edgeasync.config import FilePath
from edgeasync.core.hub.settings import EvaluationSettings, StopCondition
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.parts.agents import agent_parts
from tests.support.parts.small_runs import plain
from tests.support.programs.processes import PATIENCE_S

SPEC = SoftmaxModel(inputs=4, classes=2).spec
ONE_BY_ONE = plain(4)
ADDRESS = "inproc://hub"
ODD = [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()]
odd_errors = pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)


class Adder:
    """A trainer that adds one to every parameter, and tells of a step of that number."""

    spec = SPEC

    def __init__(self, at=0, tell=lambda: None):
        self._steps, self._at, self._tell = 0, at, tell

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += 1.0
        self._steps += 1
        if self._steps == self._at:
            self._tell()
        return StepResult(1.0, 1)


def run_settings(run, bind=ADDRESS, **keys):
    """Return the settings of a hub; `keys` are keys of `[hub]`, and whole sections."""
    hub = {name: keys.pop(name) for name in HubSection.__struct_fields__ if name in keys}
    return RunSettings(hub=HubSection(bind=bind, run=FilePath(run), **hub), **keys)


def zeros(spec=SPEC):
    """Return a model that begins with zeros."""
    return HostedModel(spec=spec, initial=lambda: np.zeros(spec.length, np.float32))


def make_hub(run, network, *, stop=StopCondition(), evaluation=EvaluationSettings(), model=None, **options):  # noqa: B008 (frozen)
    settings = run_settings(run, policy=ONE_BY_ONE, stop=stop, evaluation=evaluation)
    return HubRuntime(settings, model or zeros(), network=network, **options)


def make_agent(network, trainer=None, **options):
    trainer = trainer or Adder()
    return AgentRuntime(*agent_parts(lambda _: trainer, hub=ADDRESS), network=network, **options)


async def serve(hub, *agents):
    """Run a hub and its agents until the hub has ended; raise what any of them raises."""

    async def until_it_ends():
        reason = await hub.run()
        for agent in agents:
            agent.request_stop()
        return reason

    async with asyncio.timeout(PATIENCE_S):
        serving = asyncio.gather(until_it_ends(), *[agent.run() for agent in agents])
        try:
            return (await serving)[0]
        finally:
            serving.cancel()
            await asyncio.wait((serving,))


def workers():
    """Return the names of the threads of hubs and agents that do not end by themselves."""
    names = ("open", "fold", "journal", "save", "evaluate", "train")
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    for thread in threads:
        thread.join(PATIENCE_S)
    return [thread.name for thread in threads if thread.is_alive()]


def fail(error):
    raise error
