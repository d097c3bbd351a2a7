"""Devices in virtual time: their shell in the simulator."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from edgeasync.core.arrays.spool import HeldModel, Spool, TrainerState
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import DeviceReport, EndAgent
from edgeasync.core.device.events import Disconnected, Sensed
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import Throttle, ThrottleReadings, ThrottleSection
from edgeasync.core.engine.device_engine import DeviceEngine
from edgeasync.core.engine.sender import ANYBODY
from edgeasync.core.hub.events import Peer
from edgeasync.errors import StorageError
from edgeasync.parameters import layout_of
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import STAGES
from edgeasync.protocol.graph import Base, fingerprint_of
from edgeasync.protocol.messages import DeviceProfile, Hello, Welcome
from edgeasync.protocol.wire import Buffer
from edgeasync.training.trainer import ResumableTrainer, Trainer
from simulation.clock import DeviceTime
from simulation.hub import SimulatedHub
from simulation.link import LinkDirection, LinkProfile
from simulation.training import SimulatedTraining, SimulatedWorkload


class StoredBases:
    """A device's disk as a cache of bases, which outlives a power cut: `received` counts what it was given."""

    def __init__(self) -> None:
        self.stored: dict[Base, bytearray] = {}
        self.received: Counter[Base] = Counter()

    def find(self, base: Base) -> int | None:
        """Return how much of it is there."""
        return len(self.stored.get(base, b""))

    def append(self, base: Base, offset: int, part: Buffer) -> None:
        """Store what follows."""
        content = self.stored.setdefault(base, bytearray())
        if offset != len(content):
            raise StorageError(f"byte {offset} follows byte {len(content)}")
        content += part
        self.received[base] += len(part)

    def finish(self, base: Base, checksum: int) -> bool:
        """Compare the fingerprint; forget what is not the base."""
        if fingerprint_of(self.stored[base]) == base.fingerprint:
            return True
        if wire.checksum(self.stored.pop(base)) != checksum:
            raise StorageError("damaged on its way")
        return False


class DeviceStore:
    """A device's disk: training graphs, the count of the day's bytes, and as a `DeviceSpool` update and model."""

    def __init__(self, training: SimulatedTraining, warn: Callable[[str], None]) -> None:
        self.graphs: dict[str, bytes] = {}
        self.bases = StoredBases()
        self.quota: QuotaRecord | None = None
        self.spool: Spool | None = None
        self.held: HeldModel | None = None
        self._training = training
        self._warn = warn
        self._trainer_state: TrainerState | None = None

    def recall(self) -> tuple[Spool | None, HeldModel | None]:
        """Return the update and the model that were kept; hold the trainer's state for `restore`."""
        if self.spool is not None:
            self._trainer_state = self.spool.trainer
        return self.spool, self.held

    def restore(self) -> None:
        """Let the trainer resume from what was kept."""
        trainer = self._training.trainer
        if self._trainer_state is not None and isinstance(trainer, ResumableTrainer):
            trainer.restore(self._trainer_state)
        self._trainer_state = None

    def keep(self, spool: Spool) -> None:
        """Keep a copy."""
        trainer = self._training.trainer
        state = trainer.state() if isinstance(trainer, ResumableTrainer) else {}
        self.spool = Spool(
            spool.model,
            spool.push,
            bytes(spool.payload),
            None if spool.residual is None else spool.residual.copy(),
            {name: array.copy() for name, array in state.items()},
        )

    def keep_model(self, held: HeldModel) -> None:
        """Keep a copy."""
        self.held = msgspec.structs.replace(held, values=held.values.copy())

    def put_aside(self, reason: str) -> None:
        """Forget what was kept."""
        self.spool = self._trainer_state = None
        self._warn(reason)


class SimulatedDevice:
    """A device's shell in virtual time: every local step takes `step_s`, every byte its time on the link.

    `start` switches it on, `cut_power` off, and `start` on again: a new start of the same state, as of an agent
    on the same folder. With `keeps` it repeats the update that the power cut left unanswered, and may
    still hold a model. Its `local` parameters outlive a power cut in any case. Its speed may change at
    any time, in the middle of a step, too.
    """

    def __init__(
        self,
        hub: SimulatedHub,
        device_id: str,
        trainer: Trainer,
        *,
        step_s: float,
        link: LinkProfile,
        seed: int = 0,
        workload: SimulatedWorkload | None = None,
        limits: DeviceLimits | None = None,
        throttle: ThrottleSection | None = None,
        keeps: bool = False,
    ) -> None:
        workload = workload or SimulatedWorkload()
        random = Random(f"{seed}/{device_id}")
        hello = Hello(
            device_id,
            random.randbytes(16),
            1,
            profile=DeviceProfile(examples=workload.examples, same_host=workload.same_host),
            codecs=STAGES,
            layout=layout_of(trainer.spec.parameters),
            frozen=workload.frozen,
        )

        def make_core() -> DeviceCore:
            this_start = msgspec.structs.replace(hello, incarnation=max(1, self.starts))
            return DeviceCore(this_start, limits or DeviceLimits(), random, throttle=throttle)

        self.device_id = device_id
        self.starts = 0
        self.told: list[tuple[float, DeviceReport]] = []
        self.finished: EndAgent | None = None
        self.sender = ANYBODY
        """The key that it has; to be set before it is switched on."""
        self.up = LinkDirection(hub.clock, link.up_bytes_per_s, link.delay_s, f"{seed}/{device_id}/up")
        self.down = LinkDirection(hub.clock, link.down_bytes_per_s, link.delay_s, f"{seed}/{device_id}/down")
        share = Throttle(throttle).pace.share
        self.training = SimulatedTraining(trainer, workload, hub.clock, self.after, step_s=step_s, share=share)
        self.store = DeviceStore(self.training, self._warn)
        self._hub = hub
        self._clock = hub.clock
        self._make_core = make_core
        self._keeps = keeps
        self._time = DeviceTime(hub.clock)
        self._connections = 0
        self._peer: Peer = b""
        self._powered = False
        self.engine = self._make_engine()

    @property
    def running(self) -> bool:
        """Whether the device is on, and its agent has not ended."""
        return self._powered and self.finished is None

    @property
    def now_s(self) -> float:
        """What the device's own clock shows."""
        return self._time.now_s

    @property
    def steps_total(self) -> int:
        """Local steps since the device was last switched on, those of the running work included."""
        return self.training.steps_total

    def start(self) -> None:
        """Switch the device on."""
        if self._powered:
            raise RuntimeError(f"{self.device_id} is on already")
        self._powered = True
        self.finished = None
        self.starts += 1
        if self.starts > 1:
            self.engine = self._make_engine()
            self.engine.recall(*self.store.recall())
        self.engine.begin()
        self._schedule_tick()

    def cut_power(self) -> None:
        """Switch the device off, without a word: work, model and whatever it had not sent yet are lost."""
        self._powered = False
        self.up.cut()
        self.down.cut()
        self.disconnect()
        self.training.cut_power()
        self._time.reset()

    def break_connection(self) -> None:
        """Break the connection, as a router that restarts does: what had not left is lost; the device knows."""
        self.up.cut()
        self.down.cut()
        self.disconnect()
        self.engine.handle(Disconnected())
        self._schedule_tick()

    def sense(self, readings: ThrottleReadings) -> None:
        """Let the device's sensors tell this."""
        self.engine.handle(Sensed(readings))
        self._schedule_tick()

    def jump_clock(self, by_s: float) -> None:
        """Let the device's own clock show a later time from now on, as after a sleep that it did not notice."""
        self._time.jump(by_s)
        self._schedule_tick()

    def suspend(self, *, clock_stands: bool = False) -> None:
        """Let the device do nothing until `resume`; what comes in meanwhile waits.

        Its clock may stand still meanwhile, as a monotonic one does.
        """
        if self._powered:
            self._time.suspend(clock_stands=clock_stands)

    def resume(self) -> None:
        """Let a suspended device continue."""
        if self._time.suspended:
            self._time.resume()
            self._schedule_tick()

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something on the device in a while, unless it is switched off by then."""
        self._clock.after(delay_s, partial(self._act, self.starts, action))

    def _act(self, start: int, action: Callable[[], object]) -> None:
        if not self.running or self.starts != start:
            return
        if self._time.suspended:
            self._time.hold_back(partial(self._act, start, action))
            return
        action()
        self._schedule_tick()

    def _make_engine(self) -> DeviceEngine:
        core = self._make_core()
        if self.store.quota is not None:
            core.data_quota.recall(self.store.quota)
        spool = self.store if self._keeps else None
        return DeviceEngine(core, self, self.training, lambda: self.now_s, spool=spool)

    def _schedule_tick(self) -> None:
        due_s, time = self.engine.next_deadline_s(), self._time
        if due_s is None or not self._powered or time.suspended:
            return
        due_s = time.when(due_s)
        if time.tick_at_s is None or time.tick_at_s > due_s:
            time.tick_at_s = due_s
            self._clock.at(due_s, lambda: self._tick(due_s))

    def _tick(self, due_s: float) -> None:
        if self._time.tick_at_s == due_s and not self._time.suspended:
            self._time.tick_at_s = None
            self.engine.tick(self.steps_total)
            self._schedule_tick()

    def _deliver(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        def take_in(header: bytes, payload: Buffer | None) -> None:
            if peer == self._peer:
                self.engine.on_message(header, payload)
                self._schedule_tick()

        def arrive(header: bytes, payload: Buffer | None) -> None:
            if self._time.suspended:
                self._time.hold_back(lambda: take_in(header, payload))
            else:
                take_in(header, payload)

        self.down.send_message(header, payload, arrive)

    def _warn(self, sentence: str) -> None:
        self.report(DeviceReport("warning", sentence))

    # -- what the engine asks for -----------------------------------------------------------------------------

    def connect(self) -> None:
        """Open a fresh connection to the hub."""
        self.disconnect()
        self._connections += 1
        self._peer = peer = f"{self.device_id}#{self._connections}".encode()
        self._hub.connect(peer, lambda header, payload: self._deliver(peer, header, payload), self.sender)

    def disconnect(self, *, goodbye: bool = False) -> None:  # noqa: ARG002
        """Close the connection; what is on its way to the device is lost, what it sent still arrives."""
        self._hub.disconnect(self._peer)
        self._peer = b""

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send over the link."""
        peer = self._peer
        # A real link would copy: the device keeps training in the memory the payload is a view of.
        content = None if payload is None else bytes(payload)
        self.up.send_message(header, content, partial(self._hub.receive, peer))

    def has_connected(self) -> bool:
        """Every message takes its bytes on the link, whether a hub is there or not."""
        return True

    def has_graph(self, fingerprint: str) -> bool:
        """Look among those kept."""
        return fingerprint in self.store.graphs

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Keep a graph; it is not run: the trainer was given."""
        self.store.graphs[fingerprint] = graph

    @property
    def bases(self) -> "StoredBases":
        """Those of the device's disk."""
        return self.store.bases

    def prepare(self, welcome: Welcome) -> None:
        """Let the trainer resume from what was kept; it was given, so there is nothing to check."""
        self.training.submit(lambda: self._prepare(welcome))

    def _prepare(self, welcome: Welcome) -> None:
        self.training.local.begin(welcome.spec, welcome.settings, self._warn)
        self.store.restore()

    def keep_quota(self, record: QuotaRecord) -> None:
        """Keep it over a power cut."""
        self.store.quota = record

    def wall_s(self) -> float:
        """Return the device's own clock as the time since 1970."""
        return self._time.now_s

    def report(self, report: DeviceReport) -> None:
        """Keep what happened, with its time."""
        self.told.append((self._clock.now_s, report))

    def stop(self, stop: EndAgent) -> None:
        """End the agent; the device need not be switched off, but does nothing more."""
        self.finished = stop
        self.disconnect()
