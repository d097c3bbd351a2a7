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
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity
from edgeasync.errors import ConfigError, HubUnreachableError
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import Agent as RuntimeAgent
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.device import find_device, make_agent, planned_trainer
from edgeasync.sdk.service import Service
from edgeasync.training.plan import LocalTraining
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
    - `timeout_s`: how long to wait for a hub that lets this device in; then `HubUnreachableError` is raised, which
      says why. Without it, and once it has joined, the agent waits as long as needed.
    - `on_report`: called on the agent's loop with what happens: `report.event`, `report.detail`.
    - Other keys of `[agent]` in a settings file, such as `local_steps_max` or `threads` (docs/settings.md).

    It is ready at once; `wait_until_joined` waits for the hub.

    >>> import tempfile
    >>> import numpy as np
    >>> from edgeasync import Agent, Hub, Stop
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> model, until = SoftmaxModel(inputs=4, classes=2), Stop(updates=20)
    >>> with Hub(model, run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*", until=until) as hub:
    ...     with Agent(hub.address, (np.eye(4), [0, 1, 0, 1])) as agent:
    ...         agent.wait()
    'the hub has finished training'
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
        timeout_s: float | None = None,
        on_report: Callable[[Report], None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if (data is None) == (trainer is None):
            raise ConfigError("an agent trains on data, or with a trainer of its own: give one of the two")
        folder = None if state is None else str(state)
        own = {"hub": hub or None, "device_id": name, "state": folder, "enrol": enrol, "seed": seed}
        if twice := sorted({*own, "data", "insecure"} & settings.keys()):
            raise ConfigError(f"{twice[0]} is said by an argument of its own")
        said = {key: value for key, value in own.items() if value is not None}
        self._section = convert({**settings, **said, "insecure": insecure}, AgentSection, where="Agent")
        self._data = data
        self._trainer = trainer
        self._own = optimizer, batch_size
        self._on_report = on_report
        self._timeout_s = timeout_s
        self._trouble = ""
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
            self._agent = await asyncio.to_thread(self._make, dataset, stack)
            if self._stopping:
                self._agent.request_stop()
            self._note_ready()
            if self._timeout_s is None:
                return await self._agent.run()
            return await self._run_in_time(self._agent, self._timeout_s)

    async def _run_in_time(self, agent: RuntimeAgent, timeout_s: float) -> str:
        """Run; raises `HubUnreachableError` if no hub has let this device in by then."""
        late = False

        def look() -> None:
            nonlocal late
            late = not self._joined.done()
            if late:
                agent.request_stop()

        timer = asyncio.get_running_loop().call_later(timeout_s, look)
        try:
            reason = await agent.run()
        finally:
            timer.cancel()
        if late:
            trouble = self._trouble or f"{agent.address}: no answer yet, check the address and the network"
            raise HubUnreachableError(f"no hub let this device in within {timeout_s:g} s: {trouble}")
        return reason

    def _request_stop(self) -> None:
        if self._agent is not None:
            self._agent.request_stop()

    def _load(self) -> Dataset | None:
        from edgeasync.sdk.models import as_dataset  # noqa: PLC0415 - a device with a trainer needs none of it

        return None if self._trainer is not None else as_dataset(self._data, "data")

    def _make(self, dataset: Dataset | None, stack: contextlib.ExitStack) -> RuntimeAgent:
        section, trainer = self._section, self._trainer
        device = find_device(section)
        identity = DeviceIdentity(device.device_id, secrets.token_hex(16), 1)
        if device.state is not None:
            folder = DeviceFolder(device.state)
            identity = folder.open(device.device_id)
            stack.callback(folder.close)

        def make_trainer(welcome: Welcome) -> Trainer:
            if trainer is not None:
                return trainer
            assert dataset is not None
            return planned_trainer(section, welcome, agent.graph, dataset, self._with_own)

        agent = make_agent(
            section,
            device,
            identity,
            make_trainer,
            examples=0 if dataset is None else len(dataset),
            fingerprint=None if trainer is None else trainer.spec.fingerprint,
            on_report=self._report,
        )
        return agent

    def _with_own(self, local: LocalTraining) -> LocalTraining:
        """Return the hub's settings of local training with those that the device has of its own."""
        optimizer, batch_size = self._own
        if optimizer is None and batch_size is None:
            return local
        from edgeasync.sdk.models import local_training  # noqa: PLC0415

        own = local_training(optimizer, batch_size)
        return msgspec.structs.replace(
            local,
            optimizer=local.optimizer if optimizer is None else own.optimizer,
            batch_size=local.batch_size if batch_size is None else own.batch_size,
        )

    def _report(self, report: Report) -> None:
        if report.event == "joined" and not self._joined.done():
            self._joined.set_result(None)
        if report.event == "unreachable":
            self._trouble = report.detail
        level = logging.WARNING if report.event in ("waiting", "warning", "unreachable") else logging.INFO
        LOG.log(level, "%s: %s", report.event, report.detail)
        if self._on_report is not None:
            self._on_report(report)
