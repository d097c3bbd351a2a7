"""The agent's shell, which connects the device engine to a hub, a training thread and the disk.

The event loop communicates while the training thread computes. numpy releases the GIL, so the agent
sends its pings on time even during long steps.
"""

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

from msgspec.structs import replace

from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device import events
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import DeviceReport, EndAgent
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.core.engine.device_engine import DeviceEngine, ObserveDevice
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.errors import NoMemoryError
from edgeasync.host.completion import Completion
from edgeasync.host.host_info import describe_machine, parameters_that_fit
from edgeasync.host.sensing import Sense, SensorWatch
from edgeasync.net.address import is_same_host
from edgeasync.net.device_access import DeviceAccess
from edgeasync.net.hub_connection import HubConnection, frame_bytes_max
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import Vector, layout_of
from edgeasync.protocol.codecs import known_stages
from edgeasync.protocol.graph import Base
from edgeasync.protocol.messages import Hello, Welcome
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import OpenDevice
from edgeasync.runtime.engine_driver import EngineDriver
from edgeasync.runtime.quota_keeper import QuotaKeeper
from edgeasync.runtime.spool_keeper import SpoolKeeper
from edgeasync.runtime.training_thread import TrainingThread
from edgeasync.runtime.workload import Workload
from edgeasync.training.float16_casts import Float16Casts
from edgeasync.training.graph_check import check_graph

CLOSE_S = 1.0
"""Seconds that a stopping agent waits for the interrupted local step before it abandons the step."""

OnReport = Callable[[DeviceReport], None]
Result = TypeVar("Result")


class AgentRuntime:
    """Trains on this device for a hub, and reconnects whenever the connection is lost.

    `run` trains until the hub has finished or `request_stop` is called, and returns the reason. It
    can be called only once per agent.

    - `settings` are the tables `agent`, `limits` and `throttle`. If `parameters_max` is not set,
      the model must fit into this machine's memory.
    - `device` contains the identity, credentials and state folder. If a hub does not answer or is
      full, the agent tries the next address. The attribute `address` is the address of the current
      hub.
    - `workload` defines what is trained. Its `make_trainer` can read the hub's training graph from
      the agent's attribute `graph`, and may set the agent's `training.local_steps` and
      `training.validate`.
    - `on_report` is called with every report, and `observe` with every event that the core has
      handled. Both are called on the event loop.
    - Several agents in one process may share a `network`.
    - `sense` is called every second in a separate thread, and returns sensor readings. Depending on
      them, the agent pauses or slows down.

    If the trainer raises `StepsEndedError` at the first step of an assignment, `run` returns,
    because the trainer has no more steps.

    `run` raises errors that a retry does not fix: `ModelMismatchError`, `GraphError`,
    `RefusedError`, `AccessError` and `AddressError`. It also raises the exceptions that
    `make_trainer` and the trainer raise. A `StopIteration`, or an exception that is not an
    `Exception`, is replaced with an `EdgeAsyncError`.
    """

    graph: bytes | None = None
    """The training graph that the hub sent, if any."""

    _graph_held = ""

    def __init__(
        self,
        settings: AgentSettings,
        device: OpenDevice,
        workload: Workload,
        *,
        on_report: OnReport | None = None,
        observe: ObserveDevice | None = None,
        network: ZmqNetwork | None = None,
        sense: Sense | None = None,
    ) -> None:
        section, self._limits = settings.agent, settings.limits
        if self._limits.parameters_max is None:
            self._limits = replace(self._limits, parameters_max=parameters_that_fit())
        self.addresses = device.credentials.addresses
        self._on_report = on_report or (lambda _: None)
        self._ending = Completion("Agent")
        self._watch = None if sense is None else SensorWatch(sense)
        self._graphs = device.graph_cache()
        self.bases = device.base_cache(section, self._limits, self._warn_from_thread)
        self.network = self._make_connection(device, network)
        self._access = DeviceAccess(
            device.credentials, self.network, device.identity.device_id, self._on_report, self._fail_and_leave
        )
        self._local = device.local_parameters(section.local)
        self.core = self._make_core(settings.throttle, device.identity, workload)
        self.training = TrainingThread(
            workload,
            self._local,
            step_s_min=section.step_s_min,
            share=self.core.throttle.pace.share,
            hand_over=self._do_next,
            warn=self._warn_from_thread,
            fail=self._fail_from_thread,
        )
        spool_file = device.spool_file() if section.spool == "full" else None
        self._spool = None if spool_file is None else SpoolKeeper(spool_file, self._warn_from_thread)
        self.engine = DeviceEngine(
            self.core,
            self,
            self.training,
            time.monotonic,
            spool=self._spool,
            observe=observe,
            float16=Float16Casts().stage,
        )
        self._driver = EngineDriver(self._ending, self._tick, self.engine.next_deadline_s, self._fail_and_leave)
        quota_file = None if self._limits.bytes_per_day_max is None else device.quota_file()
        self._quota: QuotaKeeper | None = None
        if quota_file is not None:
            quota = self.core.data_quota
            self._quota = QuotaKeeper(quota_file, quota, self._warn_from_thread, self._fail_from_thread)

    def _make_connection(self, device: OpenDevice, network: ZmqNetwork | None) -> HubConnection:
        assert self._limits.parameters_max is not None
        return HubConnection(
            device.credentials,
            frame_bytes_max(self._limits.parameters_max, self._limits.graph_bytes_max),
            on_message=self._on_message,
            on_connected=lambda: self._handle(events.Connected()),
            on_disconnected=self._on_disconnected,
            shared=network,
        )

    def _make_core(self, throttle: ThrottleSection, identity: DeviceIdentity, workload: Workload) -> DeviceCore:
        hello = Hello(
            identity.device_id,
            bytes.fromhex(identity.state_id),
            identity.incarnation,
            profile=replace(describe_machine(workload.examples), same_host=self._is_on_the_hubs_host()),
            codecs=known_stages(),
            fingerprint=workload.fingerprint,
            layout=layout_of(workload.parameters) if workload.parameters else None,
            frozen=workload.frozen,
        )
        return DeviceCore(
            hello,
            self._limits,
            Random(identity.state_id + str(identity.incarnation)),
            hubs=len(self.addresses),
            trains_at_rest=workload.trains_at_rest,
            throttle=throttle,
        )

    def _is_on_the_hubs_host(self) -> bool:
        """Return whether all hubs are on this machine, and this agent does not limit its traffic."""
        limits = self._limits
        own = (limits.bandwidth_bytes_per_s_max, limits.link_share, limits.bytes_per_day_max)
        return own == (None, None, None) and all(map(is_same_host, self.addresses))

    async def run(self) -> str:
        """Train until the hub has finished or a stop is requested; return the reason.

        If its task is cancelled, the agent sends its goodbye, as after `request_stop`. Raises
        `EdgeAsyncError` if this agent was run before.
        """
        self._ending.begin()
        if self.training.gate.ending.is_set():
            return "stopped"
        self._driver.begin()
        if self._quota is not None:
            self._quota.begin()
        self.network.begin()
        self.training.begin(self._driver.loop)
        try:
            self._access.begin(self._begin)
            return await self._ending.wait(self.request_stop, CLOSE_S)
        finally:
            self.training.end()
            for waiting in (self._driver, self.network, self._access, self._watch):
                if waiting is not None:
                    waiting.cancel()
            try:
                if await self.training.close(CLOSE_S):
                    self.bases.close()
                    await asyncio.to_thread(self.engine.keep_model)
            finally:
                self.disconnect(goodbye=True)
                if self._quota is not None:
                    await asyncio.to_thread(self._quota.close, CLOSE_S)
                self.network.end()

    def _begin(self) -> None:
        """Load the spool that was written before a restart, then connect."""
        if self._spool is None:
            self._driver.do(self._begin_engine)
        else:
            self.training.run(self._spool.recall, lambda kept: self._begin_engine(*kept))

    def _begin_engine(self, spool: Spool | None = None, held: HeldModel | None = None) -> None:
        """Connect, and start the sensors. The engine accepts no events before this call."""
        self.engine.recall(spool, held)
        self.engine.begin()
        if self._watch is not None:
            self._watch.begin(lambda readings: self._handle(events.Sensed(readings)), self._fail_and_leave)

    @property
    def address(self) -> str:
        """The address of the current hub."""
        return self.network.address

    @property
    def joined(self) -> bool:
        """Whether this device has joined a hub."""
        return self.core.link == "joined"

    @property
    def day_left_bytes(self) -> int | None:
        """The bytes left today of the quota `bytes_per_day_max`; `None` without a quota."""
        return self.core.data_quota.left_bytes(time.monotonic())

    def stalled_s(self) -> float:
        """Return the seconds since the training thread last finished a local step or a job.

        Returns 0 if there is no work, and while the agent waits, idles or is paused by
        `request_pause`.
        """
        return self.training.stalled_s() if self._ending.begun and not self._ending.reached else 0.0

    def last_events(self) -> list[str]:
        """Return one line per recent event and effect of the core. The lines contain no secrets."""
        return self.engine.recorder.lines()

    def request_stop(self) -> None:
        """Send the hub a goodbye, abandon a long local step, and let `run` return.

        Call it on the event loop. If `run` is called later, it returns at once. After `run` has
        returned, this method does nothing.
        """
        if not self._ending.begun:
            self.training.end()
        else:
            self._handle(events.DeviceStopRequested())

    def request_pause(self, *, training: bool) -> None:
        """Leave the hub until `request_resume`. Local steps continue only if `training` is true.

        Call it on the event loop while `run` is running.
        """
        self.training.gate.stand_still(asked=not training)
        self._handle(events.PauseRequested(training))

    def request_resume(self) -> None:
        """Rejoin the hub. Call it on the event loop while `run` is running."""
        self.training.gate.stand_still(asked=False)
        self.training.pause()  # overlap steps are only for the time without a hub
        self._handle(events.ResumeRequested())

    @property
    def version(self) -> int | None:
        """The number of the latest version that this device has received from the hub."""
        version = self.core.work.held.version
        return None if version is None else version.number

    def copy_model(self) -> tuple[int, Vector] | None:
        """Return the number and a copy of the latest version that this device has received.

        May be called from any thread. In the copy, local parameters have this device's values.
        Returns `None` if there is no model yet, and while a new model is being installed.
        """
        held = self.engine.held_model()
        if held is None:
            return None
        vector = held.values.copy()
        self._local.overlay(vector)
        again = self.engine.held_model()  # an install resets the version before it changes a value
        return None if again is None or again.version != held.version else (held.version.number, vector)

    def _handle(self, event: events.DeviceEvent) -> None:
        self._driver.do(lambda: self.engine.handle(event))

    def _tick(self) -> None:
        self.engine.tick(self.training.gate.steps_total)

    def _on_message(self, header: bytes, payload: Buffer | None) -> None:
        self._driver.do(lambda: self.engine.on_message(header, payload))

    def _on_disconnected(self) -> None:
        self._access.disconnected()
        self._handle(events.Disconnected())

    def _do_next(self, action: Callable[[], None]) -> None:
        self._driver.do_next(action)

    def _warn_from_thread(self, sentence: str) -> None:
        self._driver.loop.call_soon_threadsafe(self.report, DeviceReport("warning", sentence))

    def _fail_from_thread(self, error: BaseException) -> None:
        self._driver.loop.call_soon_threadsafe(self._fail_and_leave, error)

    def _fail_and_leave(self, error: BaseException) -> None:
        if isinstance(error, MemoryError):
            short = NoMemoryError(
                "not enough memory for the model on this device; stop other programs, or train a smaller model"
            )
            short.__cause__ = error
            error = short
        self._ending.fail(error)
        self.engine.handle(events.DeviceStopRequested())  # sends the goodbye

    # -- interface for the engine -----------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect a new socket, which cannot receive messages of an older connection."""
        self.disconnect()
        self.network.connect(self.core.hub)

    def disconnect(self, *, goodbye: bool = False) -> None:
        """Close the socket, if it is open. If `goodbye` is true, send the hub a goodbye first."""
        self.network.close(goodbye=goodbye, answered=self.core.handshake.answered)

    def has_connected(self) -> bool:
        """Return whether ZeroMQ's handshake on the current connection has succeeded."""
        return self.network.has_connected()

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting, or drop it if there is no connection."""
        self.network.send(header, payload)

    def has_graph(self, fingerprint: str) -> bool:
        """Return whether the graph with this fingerprint is in memory or in the cache."""
        if self._graph_held != fingerprint and self._graphs is not None:
            found = self._graphs.find(fingerprint, self._warn_from_thread)
            if found is not None:
                self.graph, self._graph_held = found, fingerprint
        return self._graph_held == fingerprint

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Store the graph in memory and, for the next start, in the cache."""
        self.graph, self._graph_held = graph, fingerprint
        if self._graphs is not None:
            self._graphs.keep(fingerprint, graph, self._warn_from_thread)

    def prepare(self, welcome: Welcome) -> None:
        """Create the trainer in the training thread, because loading a graph may take seconds."""
        self.training.submit(lambda: self._prepare(welcome))

    def _prepare(self, welcome: Welcome) -> None:
        """Validate the hub's graph, and create the trainer. Runs in the training thread."""
        if welcome.graph is not None:
            assert self.graph is not None
            base = None if welcome.base is None else Base(welcome.base, welcome.base_bytes)
            check_graph(self.graph, bytes_max=self._limits.graph_bytes_max, base=base)
        trainer = self.training.prepare(welcome)
        if self._spool is not None:
            self._spool.restore(trainer)

    def keep_quota(self, record: QuotaRecord) -> None:
        """Write today's byte count to disk in the background."""
        if self._quota is not None:
            self._quota.keep(record)

    def wall_s(self) -> float:
        """Return the seconds since 1970 by the device's clock."""
        return time.time()

    def report(self, report: DeviceReport) -> None:
        """Pass a report to the callback. If no hub is reachable, first determine the reason."""
        if report.event == "joined":
            self._access.joined()
        knock = self._access.knock
        if report.since_s is None:
            if report.event != "waiting" or not knock:
                self._on_report(report)
        elif knock:
            self._on_report(DeviceReport("waiting", knock))
        else:
            self.network.explain(report, self._report_unreached)

    def _report_unreached(self, report: DeviceReport) -> None:
        """Report that no hub is reachable, unless the agent has joined one meanwhile."""
        if self.core.link != "joined":
            self._driver.do(lambda: self._on_report(report))

    def stop(self, stop: EndAgent) -> None:
        """Make `run` return the reason, or raise the error."""
        self.training.end()
        if stop.error is not None:
            self._ending.fail(stop.error)
        else:
            self._ending.reach(stop.reason)
