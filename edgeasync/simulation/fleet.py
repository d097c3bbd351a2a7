"""Devices in virtual time: their shell in the simulator."""

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

import msgspec

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import HeldModel, Spool, TrainerState
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import DeviceReport, EndAgent
from edgeasync.core.device.events import Disconnected, Sensed, Trained
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import Pace, Throttle, ThrottleReadings, ThrottleSection
from edgeasync.core.engine.clock import OffsetClock
from edgeasync.core.engine.device_engine import DeviceEngine
from edgeasync.core.engine.sender import ANYBODY
from edgeasync.core.hub.events import Peer
from edgeasync.parameters import Vector, layout_of
from edgeasync.protocol.codecs import STAGES
from edgeasync.protocol.messages import DeviceProfile, Frozen, Hello, Welcome
from edgeasync.protocol.wire import Buffer
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkDirection, LinkProfile
from edgeasync.simulation.work import Work
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.trainer import (
    ResettableTrainer,
    ResumableTrainer,
    ScalableTrainer,
    Trainer,
    take_local_steps,
)

Result = TypeVar("Result")


class SimulatedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """What a device trains with beside its trainer, and what it says of that.

    It tells the hub its number of `examples`, and `frozen`, the checksum of its arrays that do not travel. Its
    `local` parameters stay with it. It begins with `initial` values of its own, if it has any. `validate` returns
    the loss of its model on data of its own.
    """

    examples: int = 0
    local: LocalParameters | None = None
    initial: Vector | None = None
    validate: Callable[[Vector], float | None] | None = None
    frozen: Frozen | None = None


class SimulatedDevice:
    """A device's shell in virtual time: every local step takes `step_s`, every byte its time on the link.

    `start` switches it on, `cut_power` off, and `start` on again: a new start of the same state, as of an agent
    on the same folder. With `keeps` it repeats the update that the power cut left unanswered, and may
    still hold a model. Its `local` parameters outlive a power cut in any case. Speed and link may change at any
    time, in the middle of a step or a transfer, too.
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
        self._random = Random(f"{seed}/{device_id}")
        self._state_id = self._random.randbytes(16)
        self.device_id = device_id
        self.starts = 0
        self.told: list[tuple[float, DeviceReport]] = []
        self.finished: EndAgent | None = None
        self.graphs: dict[str, bytes] = {}
        self.sender = ANYBODY
        """The key that it has; to be set before it is switched on."""
        self._clock = clock = hub.clock
        self._hub = hub
        self._trainer = trainer
        self._workload = workload or SimulatedWorkload()
        self._day_record: QuotaRecord | None = None
        self._keeps = keeps
        self._local = self._workload.local or LocalParameters()
        self.spool: Spool | None = None
        self.held: HeldModel | None = None
        self._trainer_state: TrainerState | None = None
        self._limits, self._throttle = limits or DeviceLimits(), throttle
        self._share = Throttle(throttle).pace.share
        self._full_step_s, self._step_s = step_s, step_s / self._share
        self.up = LinkDirection(clock, link.up_bytes_per_s, link.delay_s, f"{seed}/{device_id}/up")
        self.down = LinkDirection(clock, link.down_bytes_per_s, link.delay_s, f"{seed}/{device_id}/down")
        self._suspended = False
        self._own_clock = OffsetClock(self._virtual_s, clock.now_s)
        self._held_back: list[Callable[[], None]] = []
        self._connections = 0
        self._peer: Peer = b""
        self._powered = False
        self._steps_before = 0
        self._work: Work | None = None
        self._ticking: float | None = None
        self.engine = self._make_engine()

    @property
    def running(self) -> bool:
        """Whether the device is on, and its agent has not ended."""
        return self._powered and self.finished is None

    @property
    def now_s(self) -> float:
        """What the device's own clock shows."""
        return self._own_clock()

    @property
    def step_s(self) -> float:
        """How long a local step takes."""
        return self._step_s

    @property
    def steps_total(self) -> int:
        """Local steps since the device was last switched on, those of the running work included."""
        work = self._work
        if work is None:
            return self._steps_before
        done = work.steps_done + (self._clock.now_s - work.since_s) / self._step_s
        return self._steps_before + min(work.local_steps, int(done))

    def start(self) -> None:
        """Switch the device on."""
        if self._powered:
            raise RuntimeError(f"{self.device_id} is on already")
        self._powered = True
        self.finished = None
        self.starts += 1
        if self.starts > 1:
            self.engine = self._make_engine()
            self.engine.recall(self.spool, self.held)
            if self.spool is not None:
                self._trainer_state = self.spool.trainer
        self.engine.begin()
        self._schedule_tick()

    def cut_power(self) -> None:
        """Switch the device off, without a word: work, model and whatever it had not sent yet are lost."""
        self._powered = False
        self.up.cut()
        self.down.cut()
        self.disconnect()
        self._work = self._ticking = None
        self._steps_before = 0
        self._change_pace(self._full_step_s, Throttle(self._throttle).pace.share)
        self._wake()
        self._held_back.clear()

    def break_connection(self) -> None:
        """Break the connection, as a router that restarts does: what had not left is lost; the device knows."""
        self.up.cut()
        self.down.cut()
        self.disconnect()
        self.engine.handle(Disconnected())
        self._schedule_tick()

    def change_speed(self, step_s: float) -> None:
        """Let a local step take `step_s` from now on; of a running one, what remains of it."""
        self._change_pace(step_s, self._share)

    def sense(self, readings: ThrottleReadings) -> None:
        """Let the device's sensors tell this."""
        self.engine.handle(Sensed(readings))
        self._schedule_tick()

    def reset_trainer(self) -> None:
        """Let the trainer forget momentum and averages, if it can."""
        if isinstance(self._trainer, ResettableTrainer):
            self._trainer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Let the trainer multiply its learning rate by a factor, if it can."""
        if isinstance(self._trainer, ScalableTrainer):
            self._trainer.scale_learning_rate(factor)

    def set_pace(self, pace: Pace) -> None:
        """Draw the steps out; in a pause a running one stands still."""
        self._change_pace(self._full_step_s, pace.share)

    def _change_pace(self, step_s: float, share: float) -> None:
        work = self._work
        if work is not None:
            self._settle(work)
        self._full_step_s, self._share = step_s, share
        self._step_s = step_s / share if share else math.inf
        if work is not None:
            self._arrange_end(work)

    def change_link(self, link: LinkProfile) -> None:
        """Let bytes take another time from now on, those that wait to leave among them."""
        self.up.change(link.up_bytes_per_s, link.delay_s)
        self.down.change(link.down_bytes_per_s, link.delay_s)

    def jump_clock(self, by_s: float) -> None:
        """Let the device's own clock show a later time from now on, as after a sleep that it did not notice."""
        self._own_clock = OffsetClock(self._own_clock.source, self.now_s + by_s)
        self._ticking = None
        self._schedule_tick()

    def suspend(self, *, clock_stands: bool = False) -> None:
        """Let the device do nothing until `resume`; what comes in meanwhile waits.

        Its clock may stand still meanwhile, as a monotonic one does.
        """
        if self._powered and not self._suspended:
            self._suspended = True
            if clock_stands:
                self._own_clock = OffsetClock(lambda: 0.0, self.now_s)

    def resume(self) -> None:
        """Let a suspended device continue."""
        if not self._suspended:
            return
        self._wake()
        self._ticking = None
        held_back, self._held_back = self._held_back, []
        for action in held_back:
            action()
        self._schedule_tick()

    def _wake(self) -> None:
        self._suspended = False
        self._own_clock = OffsetClock(self._virtual_s, self.now_s)

    def _virtual_s(self) -> float:
        return self._clock.now_s

    def _make_engine(self) -> DeviceEngine:
        hello = Hello(
            self.device_id,
            self._state_id,
            max(1, self.starts),
            profile=DeviceProfile(examples=self._workload.examples),
            codecs=STAGES,
            layout=layout_of(self._trainer.spec.parameters),
            frozen=self._workload.frozen,
        )
        core = DeviceCore(hello, self._limits, self._random, throttle=self._throttle)
        if self._day_record is not None:
            core.data_quota.recall(self._day_record)
        return DeviceEngine(core, self, lambda: self.now_s, keeps=self._keeps)

    def _schedule_tick(self) -> None:
        due_s = self.engine.next_deadline_s()
        if due_s is None or not self._powered or self._suspended:
            return
        due_s = self._own_clock.when(due_s)
        if self._ticking is not None and self._ticking <= due_s:
            return
        self._ticking = due_s
        self._clock.at(due_s, lambda: self._tick(due_s))

    def _tick(self, due_s: float) -> None:
        if self._ticking == due_s and not self._suspended:
            self._ticking = None
            self.engine.tick(self.steps_total)
            self._schedule_tick()

    def _deliver(self, peer: Peer, header: bytes, payload: Buffer | None) -> None:
        def take_in(header: bytes, payload: Buffer | None) -> None:
            if peer == self._peer:
                self.engine.on_message(header, payload)
                self._schedule_tick()

        def arrive(header: bytes, payload: Buffer | None) -> None:
            if not self._suspended:
                take_in(header, payload)
            else:
                self._held_back.append(lambda: take_in(header, payload))

        self.down.send_message(header, payload, arrive)

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
        return fingerprint in self.graphs

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Keep a graph; it is not run: the trainer was given."""
        self.graphs[fingerprint] = graph

    def prepare(self, welcome: Welcome) -> None:
        """Let the trainer resume from what was kept; it was given, so there is nothing to check."""
        self._local.begin(welcome.spec, welcome.settings, lambda told: self.report(DeviceReport("warning", told)))
        if self._trainer_state is not None and isinstance(self._trainer, ResumableTrainer):
            self._trainer.restore(self._trainer_state)
        self._trainer_state = None

    def keep(self, spool: Spool) -> None:
        """Keep a copy that outlives a power cut."""
        trainer = self._trainer.state() if isinstance(self._trainer, ResumableTrainer) else {}
        self.spool = Spool(
            spool.model,
            spool.push,
            bytes(spool.payload),
            None if spool.residual is None else spool.residual.copy(),
            {name: array.copy() for name, array in trainer.items()},
        )

    def keep_model(self, held: HeldModel) -> None:
        """Keep a copy that outlives a power cut."""
        self.held = msgspec.structs.replace(held, values=held.values.copy())

    def keep_quota(self, record: QuotaRecord) -> None:
        """Keep it over a power cut."""
        self._day_record = record

    def put_aside(self, reason: str) -> None:
        """Forget what was kept."""
        self.spool = self._trainer_state = None
        self.report(DeviceReport("warning", reason))

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool
    ) -> None:
        """Let the time of the local steps pass, then take them and tell: work that is cut off costs nothing."""
        begins, validate = self.engine.core.work.pending.seq_last == 0, self._workload.validate

        def finish(steps_done: int) -> None:
            with self._local.in_place(model.parameters):
                if not overlap:
                    if begins and self._workload.initial is not None:
                        model.parameters[:] = self._workload.initial
                    self._trainer.begin(model.parameters)
                result = take_local_steps(
                    self._trainer,
                    steps_done,
                    should_stop=lambda: False,
                    on_step=lambda: None,
                    wait=lambda _: None,
                    clock=lambda: 0.0,
                    continues=overlap,
                )
                loss = None if overlap or validate is None else validate(model.parameters)
            self._local.keep()
            assert result is not None
            step_s = work.spent_s / max(1, steps_done)
            then(msgspec.structs.replace(result, step_s=step_s, validation_loss=loss))

        self._work = work = Work(local_steps, self._clock.now_s, finish, overlap=overlap)
        self._arrange_end(work)

    def pause(self) -> None:
        """End overlapped training at once; the time of the unfinished step is lost."""
        work = self._work
        if work is None or not work.overlap:
            return
        self._settle(work)
        self._work = None
        if steps_done := int(work.steps_done):
            work.spent_s *= steps_done / work.steps_done
            self._steps_before += steps_done
            work.finish(steps_done)

    def _settle(self, work: Work) -> None:
        """Account for the time since the work was last looked at."""
        passed_s = self._clock.now_s - work.since_s
        work.since_s = self._clock.now_s
        # A suspended device may be done already, and not know.
        work.steps_done = min(float(work.local_steps), work.steps_done + passed_s / self._step_s)
        if self._share:  # a pause is no time of a step
            work.spent_s += passed_s

    def _arrange_end(self, work: Work) -> None:
        work.changes += 1
        changes = work.changes
        if not self._share:
            return
        remaining_s = (work.local_steps - work.steps_done) * self._step_s

        def end() -> None:
            if self._work is not work or work.changes != changes:
                return
            work.spent_s += remaining_s
            self._work = None
            self._steps_before += work.local_steps
            work.finish(work.local_steps)

        self.after(remaining_s, end)

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` next, in no time."""
        self.after(0.0, lambda: then(work()))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something on the device in a while, unless it is switched off by then."""
        self._clock.after(delay_s, partial(self._act, self.starts, action))

    def _act(self, start: int, action: Callable[[], None]) -> None:
        if not self.running or self.starts != start:
            return
        if self._suspended:
            self._held_back.append(partial(self._act, start, action))
            return
        action()
        self._schedule_tick()

    def report(self, report: DeviceReport) -> None:
        """Keep what happened, with its time."""
        self.told.append((self._clock.now_s, report))

    def stop(self, stop: EndAgent) -> None:
        """End the agent; the device need not be switched off, but does nothing more."""
        self.finished = stop
        self.disconnect()
