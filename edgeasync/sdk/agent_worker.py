"""One device of an `Agent`: the agent that trains for the hub, its data or its trainer, and what it tells."""

import concurrent.futures
import math
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.device.events import DeviceEvent, DeviceReceived, ModelInstalled
from edgeasync.core.hub.outcomes import outcome_name
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.host.sensing import Sense
from edgeasync.losses import LossSetting, kind_of
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Ack, Assignment, Duplicate, Push, Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import Device, planned_trainer
from edgeasync.runtime.workload import MakeInitial, Workload
from edgeasync.sdk import events
from edgeasync.sdk.models import Prepared, as_dataset, evaluator_of, prepare_as
from edgeasync.sdk.participants import frozen_of
from edgeasync.sdk.shares import Share, hold_back
from edgeasync.training.evaluation import Evaluator, NumpyEvaluator
from edgeasync.training.passes import PassesTrainer
from edgeasync.training.plan import CodeModel, LocalTraining, ShippedModel, read_plan
from edgeasync.training.trainer import Trainer

INSTALL_S = 5.0
"""How long an evaluation waits for a model that is just being installed."""


class OwnTraining(NamedTuple):
    """What an agent's user decides about how its devices train.

    - `model`: what a device trains on its data; `None` means what the hub's welcome says.
    - `initial` makes the parameters that it begins with, if not the hub's.
    - `local` changes the hub's settings of local training.
    - Another `loss` of the hub's graph is refused.
    - `validation` are data or a function, or the share of its own data that is kept back.
    - `epochs` are its passes over its data between two exchanges. After `passes` it takes no more steps.
    """

    model: object
    initial: MakeInitial | None
    local: Callable[[LocalTraining], LocalTraining]
    loss: LossSetting | None
    validation: object
    epochs: float | None
    passes: int | None


class AgentWorker:
    """A device of an agent. `make` it, then run `agent`, then `close` it.

    - `part`: its data, or a trainer of the user's own. `own` says how it trains.
    - `tell` is given events, and `on_report` what the agent reports.
    - `network` and `sense` are as for `AgentRuntime`.
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
        """Done once the hub has let it in."""
        self._settings, self._section = settings, settings.agent
        self._device = device
        self._own = own
        self._part, self._validation = hold_back(part, own.validation, self._section.seed)
        self._tell = tell
        self._on_report = on_report
        self._network, self._sense = network, sense
        self._folder: DeviceFolder | None = None
        self._trainer: Any = None
        self._prepared: Prepared | None = None
        self._began_s = time.monotonic()
        self._push: Push | None = None
        self._outcome = ""
        self._bytes = (0, 0)

    @property
    def now_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_s

    @property
    def exchanges(self) -> int:
        """How many updates the hub has answered."""
        return 0 if self.agent is None else self.agent.core.work.updates_answered

    @property
    def version(self) -> int:
        """The number of the newest model that is here, -1 without one."""
        version = None if self.agent is None else self.agent.version
        return -1 if version is None else version

    def make(self) -> AgentRuntime:
        """Open the state folder, and make the agent; raises what `Device.open` and `DeviceFolder` raise."""
        device, part = self._device, self._part
        own = self._own.model if isinstance(part, Dataset) else part
        identity = DeviceIdentity(device.device_id, secrets.token_hex(16), 1)
        if device.state is not None:
            self._folder = DeviceFolder(device.state)
            identity = self._folder.open(device.device_id)
        workload = Workload(
            self._make_trainer,
            initial=self._own.initial,
            examples=len(part) if isinstance(part, Dataset) else 0,
            fingerprint=None if isinstance(part, Dataset) else part.spec.fingerprint,
            parameters=spec.parameters if isinstance(spec := getattr(own, "spec", None), ParameterSpec) else (),
            frozen=frozen_of(own),
        )
        self.agent = AgentRuntime(
            self._settings,
            device.open(identity, self._section),
            workload,
            on_report=self._report,
            observe=self._observe,
            network=self._network,
            sense=self._sense,
        )
        return self.agent

    def close(self) -> None:
        """Release the state folder."""
        if self._folder is not None:
            self._folder.close()

    def _make_trainer(self, welcome: Welcome) -> Trainer:
        agent, part = self.agent, self._part
        assert agent is not None
        if not isinstance(part, Dataset):
            self._watch_own(agent, welcome)
            return part
        chosen: list[LocalTraining] = []

        def own(local: LocalTraining) -> LocalTraining:
            chosen.append(self._own.local(local))
            return chosen[-1]

        if self._own.model is None:
            trainer = planned_trainer(self._section, welcome, agent.graph, part, own)
            self._check_loss(getattr(trainer, "loss", None))
        else:
            local = own(read_plan(welcome.settings).local if welcome.settings else LocalTraining())
            if self._section.micro_batch_size is not None:
                local = replace(local, micro_batch_size=self._section.micro_batch_size)
            self._prepared = prepare_as(self._own.model, welcome.spec, local)
            trainer = self._prepared.make_trainer(part, self._section.seed, self._section.cores_used)
        self._trainer = trainer
        self._watch_own(agent, welcome)
        if self._own.epochs is not None:
            local = chosen[-1]
            batch_size = getattr(trainer, "batch_size", None) or local.batch_size  # a graph may have a fixed one
            accumulates = self._prepared is None or self._prepared.accumulates
            batches = local.accumulation_steps if accumulates else 1
            examples = min(batch_size * batches, len(part))
            agent.training.local_steps = max(1, math.ceil(self._own.epochs * len(part) / examples))
        if self._own.passes is None:
            return trainer
        fixed = getattr(trainer, "batch_size", None) or 1  # of a graph that takes full batches alone
        return PassesTrainer(trainer, self._own.passes * (len(part) // fixed * fixed))

    def _check_loss(self, found: str | None) -> None:
        loss = self._own.loss
        if loss is not None and found is not None and kind_of(loss) != found:
            wanted = kind_of(loss)
            raise ConfigError(f"the hub's model has the loss {found}, this device {wanted}: give both the same")

    # -- what happens ----------------------------------------------------------------------------------------

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
        """See every event of the device's core, on the loop."""
        agent = self.agent
        assert agent is not None
        self._push = agent.core.work.pending.push or self._push
        match event:
            case DeviceReceived(message=Ack() as ack) | DeviceReceived(message=Assignment(ack=Ack() as ack)):
                if self._push is not None and ack.seq == self._push.seq:
                    self._outcome = outcome_name(
                        ack.outcome.first if isinstance(ack.outcome, Duplicate) else ack.outcome
                    )
            case ModelInstalled(assignment=assignment) if self._push is not None and self._outcome:
                self._tell_exchange(agent, self._push, assignment.version.number)

    def _tell_exchange(self, agent: AgentRuntime, push: Push, version: int) -> None:
        up, down = self._bytes
        self._bytes = agent.network.bytes_up, agent.network.bytes_down
        outcome, self._outcome = self._outcome, ""
        self._tell(events.Exchange(
            time_s=self.now_s,
            device=self._device.device_id,
            number=push.seq,
            outcome=outcome,
            version=version,
            loss=push.loss_mean,
            examples=push.examples,
            local_steps=push.local_steps,
            metrics={} if push.metrics is None else dict(push.metrics),
            bytes_up=agent.network.bytes_up - up,
            bytes_down=agent.network.bytes_down - down,
        ))  # fmt: skip

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, data: object) -> events.Evaluation:
        """Evaluate the newest model that is here, in the caller's thread; raises what `Agent.evaluate` raises."""
        agent = self.agent
        assert agent is not None
        welcome = agent.core.welcome
        if welcome is None:
            raise EdgeAsyncError(
                "this agent has no model yet; wait for its first, with wait_until_joined for example"
            )
        number, vector = _newest(agent)
        found = self._evaluator(data, "evaluate", welcome)(vector)
        evaluation = events.Evaluation(time_s=self.now_s, version=number, loss=found.loss, accuracy=found.accuracy)
        self._tell(evaluation)
        return evaluation

    def _watch_own(self, agent: AgentRuntime, welcome: Welcome) -> None:
        """Let each update tell the loss of this device's own parameters, if it can measure that."""
        if self._validation is not None:
            evaluate = self._evaluator(self._validation, "validation", welcome)
            agent.training.validate = lambda vector: evaluate(vector).loss

    def _evaluator(self, data: object, name: str, welcome: Welcome) -> Evaluator:
        """Return what evaluates a vector on data, or by a function; raises `ConfigError` and `DataError`."""
        if callable(data):
            return evaluator_of(data, welcome.spec)
        if self._prepared is not None:
            return self._prepared.make_evaluator(as_dataset(data, name))
        if not welcome.settings or isinstance(model := read_plan(welcome.settings).model, CodeModel):
            raise ConfigError(
                f"Python code alone describes the hub's model: give {name} a function of the named arrays"
            )
        dataset = as_dataset(data, name)
        if isinstance(model, ShippedModel):
            trainer = self._trainer
            return lambda vector: trainer.evaluate(vector, dataset)
        return NumpyEvaluator(model, dataset)


def _newest(agent: AgentRuntime) -> tuple[int, Vector]:
    """Return number and copy of the agent's newest model; wait while it is being installed."""
    until_s = time.monotonic() + INSTALL_S
    while (found := agent.copy_model()) is None:
        if time.monotonic() > until_s:
            raise EdgeAsyncError("this agent holds no whole model at the moment; try again")
        time.sleep(0.001)
    return found
