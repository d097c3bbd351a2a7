"""One device of an `Agent`: its runtime, its data or trainer, and its events."""

import concurrent.futures
import secrets
import time
from collections.abc import Callable
from typing import Any

from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.device.events import DeviceEvent, DeviceReceived, ModelInstalled
from edgeasync.core.hub.outcomes import outcome_name
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity
from edgeasync.errors import EdgeAsyncError
from edgeasync.host.sensing import Sense
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Ack, Assignment, Duplicate, Push
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import Device
from edgeasync.runtime.workload import Workload
from edgeasync.sdk import events
from edgeasync.sdk.participants import frozen_of
from edgeasync.sdk.shares import Share
from edgeasync.sdk.trainer_factory import OwnTraining, TrainerFactory

INSTALL_S = 300.0
"""Maximum time in seconds that an evaluation waits while a model is being installed. A small
board may need minutes for the first model of a large graph.
"""


class AgentWorker:
    """One device of an `Agent`. Call `make`, run `agent`, then call `close`.

    - `part`: the device's data, or the user's trainer.
    - `own`: the user's settings for training on this device.
    - `tell` is called with events, and `on_report` with the runtime's reports.
    - `network` and `sense` are the same as for `AgentRuntime`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        device: Device,
        part: Share,
        own: OwnTraining,
        *,
        tell: Callable[[events.Event], None],
        on_report: Callable[[DeviceReport], None],
        network: ZmqNetwork | None,
        sense: Sense | None,
    ) -> None:
        self.agent: AgentRuntime | None = None
        self.joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Completed when the device joins the hub."""
        self._settings, self._section = settings, settings.agent
        self._device = device
        self._own = own
        self._training = TrainerFactory(self._section, part, own)
        self._tell = tell
        self._on_report = on_report
        self._network, self._sense = network, sense
        self._folder: DeviceFolder | None = None
        self._began_s = time.monotonic()
        self._exchanges = Exchanges()

    @property
    def now_s(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._began_s

    @property
    def exchanges(self) -> int:
        """The number of updates that the hub has answered."""
        return 0 if self.agent is None else self.agent.core.work.updates_answered

    @property
    def version(self) -> int:
        """The version number of the newest local model, or -1."""
        version = None if self.agent is None else self.agent.version
        return -1 if version is None else version

    def make(self) -> AgentRuntime:
        """Open the state folder and create the runtime.

        Raises the same errors as `Device.open` and `DeviceFolder`.
        """
        device, part = self._device, self._training.part
        own = self._own.model if isinstance(part, Dataset) else part
        identity = DeviceIdentity(device.device_id, secrets.token_hex(16), 1)
        if device.state is not None:
            self._folder = DeviceFolder(device.state)
            identity = self._folder.open(device.device_id)
        workload = Workload(
            lambda welcome: self._training.make_trainer(agent, welcome),
            initial=self._own.initial,
            examples=len(part) if isinstance(part, Dataset) else 0,
            fingerprint=None if isinstance(part, Dataset) else part.spec.fingerprint,
            parameters=spec.parameters if isinstance(spec := getattr(own, "spec", None), ParameterSpec) else (),
            frozen=frozen_of(own),
        )
        agent = self.agent = AgentRuntime(
            self._settings,
            device.open(identity, self._section),
            workload,
            on_report=self._report,
            observe=self._observe,
            network=self._network,
            sense=self._sense,
        )
        return agent

    def close(self) -> None:
        """Release the state folder."""
        if self._folder is not None:
            self._folder.close()

    # -- events ----------------------------------------------------------------------------------------------

    def _report(self, report: DeviceReport) -> None:
        of: dict[str, Any] = {"time_s": self.now_s, "device": self._device.device_id}
        if report.event == "joined":
            if not self.joined.done():
                self.joined.set_result(None)
            self._tell(events.Join(**of))
        elif report.event == "disconnected":
            self._tell(events.Leave(**of, detail=report.detail))
        elif report.event in ("waiting", "warning", "unreachable", "quarantined"):
            self._tell(events.Alert(**of, detail=report.detail))
        self._on_report(report)

    def _observe(self, event: DeviceEvent) -> None:
        """Process an event of the device's core; called on the event loop."""
        assert self.agent is not None
        told = self._exchanges.observe(self.agent, event)
        if told is not None:
            self._tell(events.Exchange(time_s=self.now_s, device=self._device.device_id, **told))

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, data: object) -> events.Evaluation:
        """Evaluate the newest local model in the calling thread, as `Agent.evaluate` does."""
        agent = self.agent
        assert agent is not None
        welcome = agent.core.welcome
        if welcome is None:
            raise EdgeAsyncError(
                "this agent has no model yet; wait for the first one, for example with wait_until_joined"
            )
        number, vector = _newest(agent)
        found = self._training.evaluator(data, "evaluate", welcome)(vector)
        evaluation = events.Evaluation(time_s=self.now_s, version=number, loss=found.loss, accuracy=found.accuracy)
        self._tell(evaluation)
        return evaluation


class Exchanges:
    """Detects completed exchanges: an update is answered, and the next model is installed."""

    def __init__(self) -> None:
        self._push: Push | None = None
        self._outcome = ""
        self._bytes = (0, 0)

    def observe(self, agent: AgentRuntime, event: DeviceEvent) -> dict[str, Any] | None:
        """Process an event of the core.

        If the event completes an exchange, return that exchange as a dict.
        """
        self._push = agent.core.work.pending.push or self._push
        match event:
            case DeviceReceived(message=Ack() as ack) | DeviceReceived(message=Assignment(ack=Ack() as ack)):
                if self._push is not None and ack.seq == self._push.seq:
                    outcome = ack.outcome
                    self._outcome = outcome_name(outcome.first if isinstance(outcome, Duplicate) else outcome)
            case ModelInstalled(assignment=assignment) if self._push is not None and self._outcome:
                return self._told(agent, self._push, assignment.version.number)
        return None

    def _told(self, agent: AgentRuntime, push: Push, version: int) -> dict[str, Any]:
        up, down = self._bytes
        self._bytes = agent.network.bytes_up, agent.network.bytes_down
        outcome, self._outcome = self._outcome, ""
        return {
            "number": push.seq,
            "outcome": outcome,
            "version": version,
            "loss": push.loss_mean,
            "examples": push.examples,
            "local_steps": push.local_steps,
            "metrics": dict(push.metrics or {}),
            "bytes_up": agent.network.bytes_up - up,
            "bytes_down": agent.network.bytes_down - down,
        }


def _newest(agent: AgentRuntime) -> tuple[int, Vector]:
    """Return the version number and a copy of the newest model.

    If a model is being installed, wait until that is done.
    """
    until_s = time.monotonic() + INSTALL_S
    while (found := agent.copy_model()) is None:
        if time.monotonic() > until_s:
            raise EdgeAsyncError("the agent is still installing a model; try again")
        time.sleep(0.001)
    return found
