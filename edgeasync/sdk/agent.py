"""`Agent`: a device in a Python program."""

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgeasync.config import convert
from edgeasync.core.device.effects import Report
from edgeasync.data.dataset import Dataset
from edgeasync.durable.day_file import DayFile
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity, default_device_id
from edgeasync.errors import ConfigError
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import Agent as RuntimeAgent
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.graph_cache import GraphCache
from edgeasync.sdk.service import Service
from edgeasync.training.plan import LocalTraining, ReceivedGraph, read_plan
from edgeasync.training.trainer import Trainer

LOG = logging.getLogger("edgeasync.agent")


class Agent(Service):
    """Trains on this device for a hub, and waits for the hub as long as needed.

    - `hub`: its address, or several. A device that was enrolled knows its hub.
    - `data`: a `Dataset`, a tuple `(x, y)`, or the path of a file. The hub says which model to train on it.
    - `trainer`: one of your own, instead of `data`.
    - `name`: by default this machine's name.
    - `state`: a folder that remembers who this device is. Without one it is a new device at every start.
    - `enrol`: a token from `edgeasync keys enrol`; it needs a `state` folder. Without keys the agent speaks beyond
      this machine only if it is `insecure`.
    - `optimizer`, `batch_size`: of this device, instead of the hub's.
    - `seed`: of the order of examples.
    - `on_report`: called on the agent's loop with what happens: `report.event`, `report.detail`.
    - Other keys of `[agent]` in a settings file, such as `local_steps_max` or `threads` (docs/settings.md).

    It is ready at once; `wait_until_joined` waits for the hub.

    >>> from edgeasync import Agent
    >>> agent = Agent("tcp://127.0.0.1:5555", (x, y))  # doctest: +SKIP
    >>> with agent:  # doctest: +SKIP
    ...     agent.wait()
    'finished'
    """

    def __init__(
        self,
        hub: str | Sequence[str] = (),
        data: object = None,
        *,
        trainer: Trainer | None = None,
        name: str | None = None,
        state: str | Path | None = None,
        enrol: str | None = None,
        insecure: bool = False,
        optimizer: object = None,
        batch_size: int | None = None,
        seed: int = 0,
        on_report: Callable[[Report], None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if (data is None) == (trainer is None):
            raise ConfigError("an agent trains on data, or with a trainer of its own: give one of the two")
        if enrol is not None and state is None:
            raise ConfigError("enrol needs state: a folder for the device's own key")
        said = {"seed": seed, "insecure": insecure} | {
            key: value for key, value in (("device_id", name), ("enrol", enrol)) if value is not None
        }
        if twice := sorted(said.keys() & settings.keys()):
            raise ConfigError(f"{twice[0]} is said by an argument of its own")
        self._section = convert({**settings, **said}, AgentSection, where="Agent")
        self._hubs = (hub,) if isinstance(hub, str) else tuple(hub)
        self._data = data
        self._trainer = trainer
        self._own = optimizer, batch_size
        self._state = None if state is None else Path(state).expanduser()
        self._on_report = on_report
        self._agent: RuntimeAgent | None = None
        self._joined: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def updates_answered(self) -> int:
        """How many updates the hub has answered."""
        return 0 if self._agent is None else self._agent.updates_answered

    def wait_until_joined(self, timeout_s: float | None = None) -> None:
        """Wait until the hub has let this device in; raises `TimeoutError`, or what the agent ended with."""
        either: list[concurrent.futures.Future[Any]] = [self._joined, self._done]
        found, _ = concurrent.futures.wait(either, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        if not found:
            raise TimeoutError(f"no hub let this device in within {timeout_s:g} s; its log says what became of it")
        if not self._joined.done():
            self._done.result()

    # -- how it runs -----------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        with contextlib.ExitStack() as stack:
            dataset = await asyncio.to_thread(self._load)
            name = self._section.device_id or default_device_id()
            self._agent = await asyncio.to_thread(self._make, name, dataset, stack)
            if self._stopping:
                self._agent.request_stop()
            self._note_ready()
            return await self._agent.run()

    def _request_stop(self) -> None:
        if self._agent is not None:
            self._agent.request_stop()

    def _load(self) -> Dataset | None:
        from edgeasync.sdk.models import as_dataset  # noqa: PLC0415 - a device with a trainer needs none of it

        return None if self._trainer is not None else as_dataset(self._data, "data")

    def _make(self, name: str, dataset: Dataset | None, stack: contextlib.ExitStack) -> RuntimeAgent:
        section, state = self._section, self._state
        identity, keys = DeviceIdentity(name, secrets.token_hex(16), 1), None
        if state is not None:
            folder = DeviceFolder(state)
            identity = folder.open(name)
            stack.callback(folder.close)
            found = DeviceKeys(state)
            keys = found if section.enrol is not None or found.made else None
        trainer = self._trainer

        def make_trainer(welcome: Welcome) -> Trainer:
            if trainer is not None:
                return trainer
            assert dataset is not None
            return self._planned_trainer(welcome, dataset)

        return RuntimeAgent(
            self._hubs,
            identity=identity,
            make_trainer=make_trainer,
            examples=0 if dataset is None else len(dataset),
            fingerprint=None if trainer is None else trainer.spec.fingerprint,
            graph_bytes_max=section.graph_bytes_max,
            parameters_max=section.parameters_max,
            graphs=None if state is None else GraphCache(state / "graphs"),
            step_s_min=section.step_s_min,
            local_steps_max=section.local_steps_max or 0,
            bandwidth_bytes_per_s_max=section.bandwidth_bytes_per_s_max,
            bytes_per_day_max=section.bytes_per_day_max,
            day_file=None if state is None else DayFile(state),
            alone_steps_max=section.alone_steps_max,
            insecure=section.insecure,
            keys=keys,
            enrol=section.enrol,
            on_report=self._report,
        )

    def _planned_trainer(self, welcome: Welcome, dataset: Dataset) -> Trainer:
        """Return the trainer that the hub asks for, with the device's own optimizer and batches."""
        assert self._agent is not None
        if not welcome.settings:
            raise ConfigError("Python code alone describes the hub's model: give this agent a trainer of its own")
        plan, graph, section = read_plan(welcome.settings), self._agent.graph, self._section
        plan = msgspec.structs.replace(plan, local=_with_own(plan.local, *self._own))
        received = None if graph is None else ReceivedGraph(graph, welcome.spec, section.threads, section.provider)
        return plan.make_trainer(dataset, section.seed, received, spec=welcome.spec)

    def _report(self, report: Report) -> None:
        if report.event == "joined" and not self._joined.done():
            self._joined.set_result(None)
        level = logging.WARNING if report.event in ("waiting", "warning", "unreachable") else logging.INFO
        LOG.log(level, "%s: %s", report.event, report.detail)
        if self._on_report is not None:
            self._on_report(report)


def _with_own(local: LocalTraining, optimizer: object, batch_size: int | None) -> LocalTraining:
    """Return the hub's settings of local training with those that the device has of its own."""
    if optimizer is None and batch_size is None:
        return local
    from edgeasync.sdk.models import local_training  # noqa: PLC0415

    own = local_training(optimizer, batch_size)
    return msgspec.structs.replace(
        local,
        optimizer=local.optimizer if optimizer is None else own.optimizer,
        batch_size=local.batch_size if batch_size is None else own.batch_size,
    )
