"""The device of an `Agent` without a hub: the peer that averages its model with others', and its data."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import expanded
from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.peer.effects import PeerReport
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceFolder, default_device_id
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.runtime.agent_settings import AgentSection, PeersSection
from edgeasync.runtime.peer import Peer
from edgeasync.runtime.peer_device import PeerModel, make_peer
from edgeasync.sdk import events
from edgeasync.sdk.models import Prepared, as_dataset, evaluator_of, prepare
from edgeasync.sdk.shares import Share
from edgeasync.training.evaluation import EvaluationResult
from edgeasync.training.plan import LocalTraining

OnReport = Callable[[DeviceReport], None]


class PeerWorker:
    """The one device of an agent without a hub. `make` it, then run `agent`, then `close` it."""

    def __init__(
        self,
        section: AgentSection,
        peers: PeersSection,
        part: Share,
        *,
        model: object,
        local: LocalTraining,
        graph: GraphSettings,
        passes: int | None,
        on_report: OnReport,
    ) -> None:
        assert section.state is not None
        self.agent: Peer | None = None
        self.joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once another peer is there."""
        self._section = section
        self._name = section.device_id or default_device_id()
        self._state = expanded(section.state)
        self._peers = peers if passes is None else replace(peers, epochs=float(passes), steps_max=None)
        self._part = part
        self._model = model
        self._local = local
        self._graph = graph
        self._on_report = on_report
        self._folder = DeviceFolder(self._state)
        self._prepared: Prepared | None = None
        self._began_s = time.monotonic()

    @property
    def exchanges(self) -> int:
        """How many rounds there were."""
        return 0 if self.agent is None else self.agent.times.rounds

    @property
    def version(self) -> int:
        """How many local steps its model has."""
        return -1 if self.agent is None else self.agent.steps_total

    @property
    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """A copy of the model; while it trains, a step may be half done."""
        assert self.agent is not None
        return dict(self.agent.spec.views(self.agent.parameters.copy()))

    def make(self) -> Peer:
        """Open the state folder, and make the peer; raises what `prepare` and `make_peer` raise."""
        if self._peers.peers is None:
            raise ConfigError("which peers? give peers='peers.toml', a file that names them")
        part, local = self._part, self._local
        example = part if isinstance(part, Dataset) else None
        prepared = self._prepared = prepare(
            self._model, example, local, graph=self._graph, run=self._state, seed=0
        )
        if isinstance(part, Dataset):
            trainer = prepared.make_trainer(part, self._section.seed, self._section.cores_used)
        else:
            trainer = part
        identity = self._folder.open(self._name)
        self.agent = make_peer(
            self._peers,
            identity,
            self._state,
            PeerModel(trainer, np.array(prepared.initial), frozen=prepared.frozen),
            examples_per_step=local.batch_size * local.accumulation_steps,
            examples=0 if example is None else len(example),
            step_s_min=self._section.step_s_min,
            on_report=self._report,
        )
        return self.agent

    def close(self) -> None:
        """Release the state folder."""
        self._folder.close()

    def evaluate(self, data: object) -> events.Evaluation:
        """Evaluate the model as it is, in the caller's thread; raises what `Agent.evaluate` raises."""
        agent, prepared = self.agent, self._prepared
        if agent is None or prepared is None:
            raise EdgeAsyncError("this agent has no model yet; it has not begun")
        vector = agent.parameters.copy()
        evaluator: Any = (
            evaluator_of(data, prepared.spec)
            if callable(data)
            else prepared.make_evaluator(as_dataset(data, "data"))
        )
        found: EvaluationResult = evaluator(vector)
        now_s = time.monotonic() - self._began_s
        return events.Evaluation(time_s=now_s, version=self.version, loss=found.loss, accuracy=found.accuracy)

    def _report(self, report: PeerReport) -> None:
        if report.event == "peer_found" and not self.joined.done():
            self.joined.set_result(None)
        detail = ": ".join(filter(None, (report.peer, report.detail)))
        event: Any = report.event
        self._on_report(DeviceReport(event, detail))
