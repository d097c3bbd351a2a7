"""A hub in virtual time: its shell in the simulator, with a disk or without."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, TypeVar

import msgspec

from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.engine.clock import OffsetClock
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.core.hub.events import Evaluated, Peer
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.core.recovery.log import Entry
from edgeasync.core.recovery.replay import Sessions
from edgeasync.core.recovery.state import HubState
from edgeasync.durable.commit import GroupCommit
from edgeasync.durable.disk import Disk
from edgeasync.durable.history_writer import HistoryLog
from edgeasync.durable.journal import SEGMENT_BYTES_MAX
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol import wire
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import ModelVersion, Order
from edgeasync.protocol.wire import Buffer
from simulation.clock import VirtualClock

Result = TypeVar("Result")

OPERATOR = Sender(b"operator".ljust(32, b"\0"), "operator", "operator")

Deliver = Callable[[bytes, Buffer | None], None]

Connections = Literal["silent", "broken", "kept"]
"""What becomes of connections when a hub dies: nobody hears of it, the devices do, or others take them over."""


class WritingPace(msgspec.Struct):
    """How a hub with a disk writes: a write takes `sync_s`, a checkpoint `save_s`, if that is longer.

    The journal begins a new segment after `segment_bytes_max`. The history has `history_rows_max` rows; with 0
    there is none.
    """

    sync_s: float = 0.002
    save_s: float = 0.0
    segment_bytes_max: int = SEGMENT_BYTES_MAX
    history_rows_max: int = 0


class HubLinks:
    """The connections of a hub, by peer. A message is lost if its connection breaks while it is on its way."""

    def __init__(self) -> None:
        self._deliver: dict[Peer, Deliver] = {}
        self._senders: dict[Peer, Sender] = {}
        self._reachable: set[Peer] = set()

    def open(self, peer: Peer, deliver: Deliver, sender: Sender) -> None:
        """Open a connection under a key: what is sent to `peer` goes to `deliver`."""
        self._deliver[peer] = deliver
        self._senders[peer] = sender
        self._reachable.add(peer)

    def close(self, peer: Peer) -> None:
        """Close a connection; what is on its way to the hub still arrives."""
        self._deliver.pop(peer, None)
        self._senders.pop(peer, None)

    def break_all(self) -> None:
        """Break all connections, and lose what is on its way."""
        self._deliver.clear()
        self._reachable.clear()

    def reaches(self, peer: Peer) -> bool:
        """Return whether what a peer has sent arrives."""
        return peer in self._reachable

    def sender(self, peer: Peer) -> Sender:
        """Return whose a peer's messages are."""
        return self._senders.get(peer, ANYBODY)

    def deliver(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        """Deliver a message to a peer that has a connection."""
        if (deliver := self._deliver.get(peer)) is not None:
            deliver(header, payload)


class SimulatedHub:
    """The hub's shell in virtual time; computing costs it none.

    `start` lets it run. With a disk it keeps a journal there: `crash` ends it as SIGKILL would, and the next
    `start` lets it resume from the disk. Without one nothing is saved.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        spec: ParameterSpec,
        initial: Vector,
        policy: PolicySet,
        settings: HubCoreSettings,
        seed: int,
        graph: ShippedGraph | None = None,
        disk: Disk | None = None,
        writing: WritingPace | None = None,
    ) -> None:
        self._random = Random(seed)
        self._rules = Rules(spec, policy, settings, graph is not None)
        self._initial = initial
        self._graph = graph
        self._disk = disk
        self.writing = writing or WritingPace()
        self.reports: list[tuple[float, HubReport]] = []
        self.stopped = ""
        self.running = False
        self.starts = 0
        self.log: GroupCommit | None = None
        self.clock = clock
        self._now_s = OffsetClock(lambda: clock.now_s, clock.now_s)
        self._links = HubLinks()
        self._journal_free_s = 0.0
        self._ticking: float | None = None

    @property
    def core(self) -> HubCore:
        """The hub's decisions and counters."""
        return self.engine.core

    @property
    def model(self) -> Vector:
        """The newest model."""
        return self.engine.model.current.vector

    def order(self, device_id: str, order: Literal["quarantine", "release"]) -> None:
        """Let an operator give an order."""
        message = wire.encode(Order(device_id, order))
        self.engine.on_message(OPERATOR.key, message, None, self._now_s(), OPERATOR)

    def start(self) -> None:
        """Begin, or resume from the disk; raises `StorageError` if it holds what cannot be had back."""
        if self.running:
            raise RuntimeError("the hub runs already")
        lineage = f"{self._random.getrandbits(64):016x}"
        self.running = True
        self.starts += 1
        self.stopped = ""
        try:
            if self._disk is None:
                self._start_anew(lineage)
            else:
                self._open(self._disk, lineage)
        except BaseException:
            self.crash("kept")
            raise
        self._schedule_tick()

    def crash(self, connections: Connections = "silent") -> None:
        """End at once, as SIGKILL would: what is in memory is lost.

        Connections are gone with what is on its way here, unless they are `kept`, as by a transport that connects
        again by itself: then the next start has them. If they are `broken`, tell the devices.
        """
        self.running = False
        self.log = self._ticking = None
        self._journal_free_s = 0.0
        if connections != "kept":
            self._links.break_all()

    def _start_anew(self, lineage: str) -> None:
        rules = self._rules
        sessions = Sessions(self._draw_session)
        core = self._make_core(rules, ModelVersion(lineage, 0), self.clock.now_s, sessions)
        model = HubModel(rules.spec, self._initial, 0, rules.policy)
        self.engine = HubEngine(core, model, self, sessions=sessions)

    def _open(self, disk: Disk, lineage: str) -> None:
        writing = self.writing
        run = HubRun(disk, self._rules, writing.segment_bytes_max, history_rows_max=writing.history_rows_max)
        run.open(
            self._make_core,
            lambda: (self._initial, 0),
            lineage=lineage,
            draw_session=self._draw_session,
            created_s=self.clock.now_s,
            on_entry=self.replayed,
        )
        self._run = run
        self._now_s = OffsetClock(lambda: self.clock.now_s, run.now_s)
        self.log = GroupCommit(run.journal, self, on_durable=self._on_durable, on_failing=self._on_failing)
        self.engine = HubEngine(
            run.core,
            run.model,
            self,
            sessions=run.sessions,
            publisher=run.publisher,
            log=self.log,
            observe=None if run.history is None else HistoryLog(run.history, run.core, self.log, self),
        )
        self.opened(run)
        if run.checkpoint:
            self.report(HubReport("resumed", detail=f"version {run.core.version}"))
            self.engine.resume(lineage, self._now_s())

    def replayed(self, number: int, entry: Entry, effects: Sequence[HubEffect]) -> bool:  # noqa: ARG002
        """Look at an entry that was read back, once it is applied; say whether to continue."""
        return True

    def opened(self, run: HubRun) -> None:
        """Look at what the disk gave back, before anything is done with it."""

    def _make_core(self, rules: Rules, version: ModelVersion, now_s: float, sessions: Sessions) -> HubCore:
        return rules.make_core(version, now_s, sessions, graph=self._graph)

    def _draw_session(self) -> bytes:
        return self._random.randbytes(16)

    def connect(self, peer: Peer, deliver: Deliver, sender: Sender = ANYBODY) -> None:
        """Open a connection under a key: what is sent to `peer` goes to `deliver`."""
        self._links.open(peer, deliver, sender)

    def disconnect(self, peer: Peer) -> None:
        """Close a connection."""
        self._links.close(peer)

    def receive(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        """Receive a message that came over a link, unless that broke when the hub died."""
        if self.running and not self.stopped and self._links.reaches(peer):
            self.engine.on_message(peer, header, payload, self._now_s(), self._links.sender(peer))
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        due_s = self.engine.next_deadline_s()
        if due_s == math.inf or (self._ticking is not None and self._ticking <= due_s):
            return
        self._ticking = due_s
        self._at(self._now_s.when(due_s), lambda: self._tick(due_s))

    def _tick(self, due_s: float) -> None:
        if self._ticking == due_s and not self.stopped:
            self._ticking = None
            self.engine.tick(self._now_s())
            self._schedule_tick()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, if the hub has not crashed by then."""
        start = self.starts

        def act() -> None:
            if self.running and self.starts == start:
                action()

        self.clock.at(time_s, act)

    # -- what the engine asks for -----------------------------------------------------------------------------

    def send(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        """Send over the peer's link, if it has one."""
        self._links.deliver(peer, header, payload)

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` next, in no time."""

        def act() -> None:
            then(work())
            self._schedule_tick()

        self._at(self.clock.now_s, act)

    def write_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` when the disk has had its time for it, and what was asked for before is done."""
        self._journal_free_s = max(self._journal_free_s, self.clock.now_s) + self.writing.sync_s
        self._at(self._journal_free_s, lambda: then(work()))

    def save_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` next, beside the journal."""
        self._at(self.clock.now_s, lambda: then(work()))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self._at(self.clock.now_s + delay_s, action)

    def _on_durable(self) -> None:
        self.engine.on_durable(self._now_s())
        self._schedule_tick()

    def _on_failing(self, reason: str) -> None:
        self.engine.on_failing(reason)

    def save(self, state: HubState) -> None:
        """Write a checkpoint, if there is a disk."""
        if self._disk is None:
            self.engine.saved()
        else:
            # Beside the journal, as it is written in another thread.
            self.after(max(self.writing.sync_s, self.writing.save_s), lambda: self._saved(self._write(state)))

    def _write(self, state: HubState) -> int:
        try:
            return self._run.save(state, self.clock.now_s)
        except OSError as error:
            self.report(HubReport("warning", detail=f"no checkpoint could be written: {error}"))
            return 0

    def _saved(self, covered: int) -> None:
        self.engine.saved()
        if self.log is not None and covered:
            self.log.drop_through(covered)

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write nothing."""

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate nothing: there is no held-out data."""

    def report(self, report: HubReport) -> None:
        """Keep what happened, with its time."""
        self.reports.append((self.clock.now_s, report))

    def address_of(self, peer: Peer) -> str:  # noqa: ARG002 - connections have no addresses
        """Return no address."""
        return ""

    def wall_s(self) -> float:
        """Return the virtual time as the time since 1970."""
        return self.clock.now_s

    def describe(self) -> dict[str, Any]:
        """Add nothing to the status."""
        return {}

    def stop(self, reason: str) -> None:
        """Take no more messages."""
        self.stopped = reason
