"""A hub and its devices in virtual time: the shells of the simulator."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import msgspec

from edgeasync.core.device import GRAPH_BYTES_MAX, DeviceCore
from edgeasync.core.device_effects import Finish, Tell
from edgeasync.core.device_events import Trained
from edgeasync.core.device_exchange import DeviceExchange
from edgeasync.core.device_model import DeviceModel
from edgeasync.core.effects import Report
from edgeasync.core.events import Peer
from edgeasync.core.graph import ShippedGraph
from edgeasync.core.hub import HubCore
from edgeasync.core.hub_exchange import HubExchange
from edgeasync.core.model import Model, Snapshot
from edgeasync.core.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.policy import Judgement
from edgeasync.protocol.codecs import CODECS
from edgeasync.protocol.messages import DeviceProfile, ModelVersion, Welcome
from edgeasync.protocol.wire import Buffer
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.link import Direction, LinkProfile
from edgeasync.training.trainer import Trainer, take_local_steps

Result = TypeVar("Result")


class SimulatedHub:
    """The hub's shell in virtual time; computing costs it none."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        spec: ParameterSpec,
        initial: Vector,
        judgement: Judgement,
        settings: HubCoreSettings,
        seed: int,
        graph: ShippedGraph | None = None,
    ) -> None:
        random = Random(seed)
        self.reports: list[tuple[float, Report]] = []
        self.stopped = ""
        self.saved: list[int] = []
        core = HubCore(
            spec=spec,
            training={},
            judgement=judgement,
            settings=settings,
            version=ModelVersion(f"{random.getrandbits(64):016x}", 0),
            graph=graph,
            make_session=lambda: random.randbytes(16),
            now_s=clock.now_s,
        )
        self.exchange = HubExchange(core, Model(spec, initial, 0, judgement.optimizer), self)
        self._clock = clock
        self._links: dict[Peer, Callable[[bytes, Buffer | None], None]] = {}
        self._tick()

    @property
    def core(self) -> HubCore:
        """The hub's decisions and counters."""
        return self.exchange.core

    @property
    def model(self) -> Vector:
        """The newest model."""
        return self.exchange.model.current.vector

    def connect(self, peer: Peer, deliver: Callable[[bytes, Buffer | None], None]) -> None:
        """Open a connection: what is sent to `peer` goes to `deliver`."""
        self._links[peer] = deliver

    def disconnect(self, peer: Peer) -> None:
        """Close a connection."""
        self._links.pop(peer, None)

    def receive(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        """Take in a message that came over a link."""
        if not self.stopped:
            self.exchange.on_message(peer, header, payload, self._clock.now_s)

    def _tick(self) -> None:
        self.exchange.tick(self._clock.now_s)
        if not self.stopped:
            self._clock.after(max(1e-3, self.core.next_deadline_s() - self._clock.now_s), self._tick)

    # -- what the exchange asks for --------------------------------------------------------------------------

    def send(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        """Send over the peer's link, if it has one."""
        if (deliver := self._links.get(peer)) is not None:
            deliver(header, payload)

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` next, in no time."""
        self._clock.after(0.0, lambda: then(work()))

    def save(self, snapshot: Snapshot, *, last: bool) -> None:  # noqa: ARG002
        """Note the version; nothing is written."""
        self.saved.append(snapshot.number)

    def report(self, report: Report) -> None:
        """Keep what happened, with its time."""
        self.reports.append((self._clock.now_s, report))

    def describe(self) -> dict[str, Any]:
        """Add nothing to the status."""
        return {}

    def stop(self, reason: str) -> None:
        """Take no more messages."""
        self.stopped = reason


class SimulatedDevice:
    """A device's shell in virtual time: every local step takes `step_s`, every byte its time on the link."""

    def __init__(
        self,
        clock: VirtualClock,
        hub: SimulatedHub,
        device_id: str,
        trainer: Trainer,
        *,
        step_s: float,
        link: LinkProfile,
        examples: int = 0,
        seed: int = 0,
    ) -> None:
        random = Random(f"{seed}/{device_id}")
        self.device_id = device_id
        self.steps_total = 0
        self.told: list[tuple[float, Tell]] = []
        self.finished: Finish | None = None
        self.graphs: dict[str, bytes] = {}
        self._clock = clock
        self._hub = hub
        self._trainer = trainer
        self._step_s = step_s
        self.up = Direction(clock, link.up_bytes_per_s, link.delay_s)
        self.down = Direction(clock, link.down_bytes_per_s, link.delay_s)
        self._connections = 0
        self._peer: Peer = b""
        core = DeviceCore(
            device_id=device_id,
            state_id=random.randbytes(16),
            start=1,
            profile=DeviceProfile(examples=examples),
            codecs=tuple(CODECS),
            fingerprint=None,
            graph_bytes_max=GRAPH_BYTES_MAX,
            random=random,
        )
        self.exchange = DeviceExchange(core, self, lambda: clock.now_s)
        self._ticking: float | None = None

    def start(self) -> None:
        """Switch the device on."""
        self.exchange.begin()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        due_s = self.exchange.core.next_deadline_s()
        if due_s is None or (self._ticking is not None and self._ticking <= due_s):
            return
        self._ticking = due_s
        self._clock.after(due_s - self._clock.now_s, lambda: self._tick(due_s))

    def _tick(self, due_s: float) -> None:
        if self._ticking == due_s:
            self._ticking = None
            self.exchange.tick(self.steps_total)
            self._schedule_tick()

    def _deliver(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        def arrive() -> None:
            if peer == self._peer:
                self.exchange.on_message(header, payload)
                self._schedule_tick()

        self.down.send(len(header) + len(payload or b""), arrive)

    # -- what the exchange asks for --------------------------------------------------------------------------

    def open(self) -> None:
        """Open a fresh connection to the hub."""
        self.close()
        self._connections += 1
        self._peer = peer = f"{self.device_id}#{self._connections}".encode()
        self._hub.connect(peer, lambda header, payload: self._deliver(peer, header, payload))

    def close(self) -> None:
        """Close the connection; what is on its way is lost."""
        self._hub.disconnect(self._peer)
        self._peer = b""

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send over the link."""
        peer = self._peer
        # A real link would copy: the device goes on training in the memory the payload is a view of.
        content = None if payload is None else bytes(payload)
        self.up.send(len(header) + len(content or b""), lambda: self._hub.receive(peer, header, content))

    def has_graph(self, fingerprint: str) -> bool:
        """Look among those kept."""
        return fingerprint in self.graphs

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Keep a graph; it is not run: the trainer was given."""
        self.graphs[fingerprint] = graph

    def prepare(self, welcome: Welcome) -> None:
        """Check nothing: the trainer was given."""

    def train(self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None]) -> None:
        """Take the local steps now, and let their time pass before telling."""

        def on_step() -> None:
            self.steps_total += 1

        self._trainer.begin(model.parameters)
        result = take_local_steps(
            self._trainer,
            local_steps,
            should_stop=lambda: False,
            on_step=on_step,
            wait=lambda _: None,
            clock=lambda: 0.0,
        )
        assert result is not None
        trained = msgspec.structs.replace(result, step_s=self._step_s)
        self.after(local_steps * self._step_s, lambda: then(trained))

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` next, in no time."""
        self.after(0.0, lambda: then(work()))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something on the device in a while, unless it is switched off by then."""

        def act() -> None:
            if self.finished is None:
                action()
                self._schedule_tick()

        self._clock.after(delay_s, act)

    def tell(self, tell: Tell) -> None:
        """Keep what happened, with its time."""
        self.told.append((self._clock.now_s, tell))

    def finish(self, finish: Finish) -> None:
        """Switch the device off."""
        self.finished = finish
        self.close()
