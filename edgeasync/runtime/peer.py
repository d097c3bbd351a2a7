"""The shell of a peer: sockets on an event loop, a thread that trains, and one that codes meanwhile."""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from edgeasync.core.engine.peer_engine import PeerEngine
from edgeasync.core.peer.effects import EndPeer, PeerReport
from edgeasync.core.peer.events import PeersChanged, PeerStopRequested, RoundDue, RoundHalfDue, TrainingBegun
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.errors import StorageError
from edgeasync.graphs.model_file import DIVERGED, check_finite, load_kept, save_model
from edgeasync.host.awaited_step import AwaitedStep
from edgeasync.host.completion import Completion
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.host.worker import Worker
from edgeasync.net.network import ZmqNetwork
from edgeasync.net.peer_sockets import PeerSockets
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.codecs import payload_bytes_limit
from edgeasync.protocol.messages import COUNT_MAX, Frozen
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.engine_driver import EngineDriver
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.last_finite import LastFinite
from edgeasync.training.trainer import (
    BufferedTrainer,
    CoroutineTrainer,
    InterruptibleTrainer,
    ResettableTrainer,
    Trainer,
    take_local_steps,
)

CLOSE_S = 1.0
"""How long a stopping peer waits for the running local step, which it interrupts; a longer one is abandoned."""

WRITE_S = 60.0
"""How long a stopping peer waits for its last model to be written."""

LINGER_MS = 300
"""How long a closing peer keeps sending its goodbye."""

KEEP_MODEL_S = 60.0
"""The least time between two writes of the model."""

COPY_S = CLOSE_S
"""The least time between two copies of the model; an abandoned step takes what came after the last one with it."""

PINGS_PER_LEASE = 5

TICK_S = 3600.0
"""The longest time between two looks at what is due."""

LAST_ROUND_LEASES = 2.0
"""How many leases a peer that has taken its steps waits for one more round."""

TOLD_STEPS = 100
"""After this number of local steps the mean loss is that of others."""

PEER_MODEL_FILE = "peer.safetensors"
"""The model of a peer in its state folder; `model.safetensors` there is a hub's."""

OnReport = Callable[[PeerReport], None]
Result = TypeVar("Result")


class PeerTimes(msgspec.Struct):
    """How many rounds there were, the seconds they took, and those in which training stood still."""

    rounds: int = 0
    round_s: float = 0.0
    standstill_s: float = 0.0


class PeerModel(NamedTuple):
    """What a peer trains: its trainer, the values it begins with, and the forward model if it is of ONNX.

    `frozen` is the checksum of the model's arrays that do not travel.
    """

    trainer: Trainer | CoroutineTrainer
    initial: Vector
    forward: bytes | None = None
    frozen: Frozen | None = None


class PeerMember(NamedTuple):
    """A peer among the others: its entry in the list, its keys, the number of its start, and the list.

    With a `file` the list is read again when the file changes.
    """

    own: PeerEntry
    pair: KeyPair
    peers: Peers
    incarnation: int
    file: Path | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all others in the list."""
        return tuple(entry.name for entry in self.peers.peer if entry.name != self.own.name)


class PeerRuntime:
    """Trains on this device, and averages its model with others' without a hub.

    `run` trains and averages, and returns why it ended. A peer runs once. It ends at `request_stop` or after
    `rounds_max` rounds. Without these it ends after `steps_max` local steps and one more round. `epochs` are for
    its caller to count in steps.

    - `model.trainer` trains the model in place.
    - With `round_steps` it waits, up to a lease, before it takes twice as many steps without a mean.
    - `model_file` gets the model once a minute and at the end. A step that is abandoned then is not part of it. If
      the file is there, the peer resumes its model and its count of local steps.
    - With `meets` it takes its first step once it has met all others of the list, or after a lease. It then waits
      for `rounds_max` no longer if all have gone, or if its own training has diverged.
    - After a step that makes values of the model not finite, the next one begins from the last copy of a model
      that a step has left finite. That copy is written, too.

    Raises `StorageError` and `ModelMismatchError` for a file that it cannot resume. `run` raises `AddressError` if
    it cannot listen. Exceptions of the trainer pass through.
    """

    def __init__(
        self,
        member: PeerMember,
        section: PeerSection,
        model: PeerModel,
        *,
        model_file: Path | None = None,
        meets: bool = False,
        on_report: OnReport | None = None,
    ) -> None:
        self._spec: ParameterSpec = model.trainer.spec
        self.parameters, self.steps_total = model.initial, 0
        if model_file is not None:
            self.parameters, self.steps_total = load_kept(model_file, self._spec, model.initial)
        self._spec.check(self.parameters)
        self.loss: float | None = None
        """The mean loss of the last local steps."""
        self.times = PeerTimes()
        self._member = member
        self._section = section
        self._trainer = model.trainer
        self._model_file = model_file
        self._kept_s = time.monotonic()
        self._copied_s = -math.inf
        self._last_finite = LastFinite()
        self._begun_steps = self.steps_total
        self._written_steps = -1
        """The number of steps of the copy that was written last."""
        self._on_report = on_report or (lambda _: None)
        self._disk = DiskWatch(self._warn_from_thread, "a restart loses what was trained")
        self._told_diverged = False
        self._ending = Completion("Peer")
        self._stopping = threading.Event()
        self._trained = self._leaving = False
        self._snapshot_of_trained = self._has_met = self._deserted = self._is_connected = False
        self._meets = meets
        self._to_meet = set(member.others if meets else ())
        self._mean_steps = self.steps_total
        """How many local steps there were when the model moved to a mean last."""
        self._half_due_steps: int | None = None
        """After how many steps half of `round_steps` are taken since the last round began."""
        self._jobs: SimpleQueue[Callable[[Vector], None]] = SimpleQueue()
        self._awaited = AwaitedStep(self._stopping)
        self._sockets: PeerSockets | None = None
        self._stepped_s = self._round_began_s = time.monotonic()
        self._settings = _core_settings(section, model, meets=meets)
        core = PeerCore(member.own.name, member.incarnation, member.others, self._settings)
        self._engine = PeerEngine(core, self, self._spec, time.monotonic, member.incarnation)
        self._driver = EngineDriver(
            self._ending,
            lambda: self._act(self._engine.tick),
            lambda: min(self._engine.next_deadline_s(), time.monotonic() + TICK_S),
            self._fail_and_leave,
        )

    async def run(self) -> str:
        """Train and average until the end; return the reason.

        If its task is cancelled, the peer says goodbye as after `request_stop`. Raises `EdgeAsyncError` if it was
        called before.
        """
        self._ending.begin()
        if self._stopping.is_set():
            return "stopped"
        self._driver.begin()
        self._loop = self._driver.loop
        self._begun_s = time.monotonic()
        self._worker = Worker("train", self._fail_from_thread)
        self._aside = Worker("exchange", self._fail_from_thread)
        self._keeper = Worker("keep", self._fail_from_thread)
        network = ZmqNetwork()
        try:
            return await self._serve(network)
        finally:
            network.close()

    async def _serve(self, network: ZmqNetwork) -> str:
        try:
            sockets = PeerSockets(
                self._member.own,
                self._member.pair,
                self._member.peers,
                self._settings,
                network,
                bind=self._section.bind,
                file=self._member.file,
                on_message=self._on_message,
                on_peers=lambda names: self._do(lambda: self._engine.handle(PeersChanged(names))),
                on_trouble=lambda sentence: self.report(PeerReport("warning", sentence)),
            )
            sockets.listen()
            self._sockets = sockets
            self._worker.start()
            self._aside.start()
            self._keeper.start()
            self._worker.submit(self._train)
            self._do(self._engine.begin)
            return await self._ending.wait(self.request_stop, self._settings.lease_s + CLOSE_S)
        finally:
            await self._close()

    async def _close(self) -> None:
        self._driver.cancel()
        self._end_training()
        try:
            if self._keeper.started:
                await self._close_threads()
        finally:
            if self._sockets is not None:
                self._sockets.close(LINGER_MS)

    async def _close_threads(self) -> None:
        """Let the threads end, and write the last model."""
        trainer_ended = await asyncio.to_thread(self._worker.close, CLOSE_S)
        await asyncio.to_thread(self._aside.close, CLOSE_S)
        copy = self._last_finite.copy
        # An abandoned step may still write to the model.
        if copy is not None and (not trainer_ended or (self.diverged and copy[1] > self._begun_steps)):
            self.parameters, self.steps_total = copy
            self._last_finite.is_restored = False
        if not self._last_finite.is_restored:
            self._keep(self.parameters, self.steps_total)
        if not await asyncio.to_thread(self._keeper.close, WRITE_S):
            detail = f"{self._model_file}: not written in {WRITE_S:g} s; look at the disk"
            self._on_report(PeerReport("warning", detail))

    # -- what people see and ask for --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This device's name in the list."""
        return self._member.own.name

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._member.own.address if self._sockets is None else self._sockets.address

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""
        return self._spec

    @property
    def bytes_up(self) -> int:
        """Bytes of all messages to others."""
        return self._engine.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of all messages of others."""
        return self._engine.bytes_down

    @property
    def payload_bytes_up(self) -> int:
        """Bytes of coded models in the messages to others."""
        return self._engine.payload_bytes_up

    @property
    def connected(self) -> bool:
        """Whether any other peer is live."""
        return self._is_connected

    @property
    def diverged(self) -> bool:
        """Whether the last local step has left values that are not finite."""
        return self._last_finite.is_restored or not np.isfinite(self.parameters).all()

    def stalled_s(self) -> float:
        """Return for how long the trainer has not ended a local step; 0 if it has none to take."""
        if not self._ending.begun or self._ending.reached or self._trained:
            return 0.0
        return time.monotonic() - self._stepped_s

    def last_events(self) -> list[str]:
        """Return a line for each of the last events and effects of the core."""
        return self._engine.recorder.lines()

    def request_stop(self) -> None:
        """Say goodbye to the others and let `run` return; call it in the loop's thread.

        Others may still need what this device holds of a round whose mean it has: for that it stays up to a lease.
        Before `run` it makes `run` return at once. After `run` it does nothing.
        """
        if not self._ending.begun:
            self._stopping.set()
        elif not self._leaving:
            self._leaving = True
            self._loop.call_later(self._settings.lease_s, self._leave)
            self._do(lambda: None)

    def _ping_all(self) -> None:
        """Let all know at once whom this device hears: a round is of those that all hear one another."""
        if self._sockets is not None:
            names = self._sockets.peers
            self._do(lambda: self._engine.handle(PeersChanged(names)))

    def _leave(self) -> None:
        self._do(lambda: self._engine.handle(PeerStopRequested()))

    @property
    def _serves(self) -> bool:
        """Whether this device has a round's mean that others may not have yet, or all that it is computed from.

        It may have the latter if all others have gone: the core gives a round up unless they have left in order.
        """
        serving = self._engine.core.rounds.current
        return serving is not None and (self._deserted or serving.state in ("applying", "serving"))

    # -- what the engine asks for -----------------------------------------------------------------------------

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting."""
        if self._sockets is not None:
            self._sockets.send(peer, header, payload)

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the training thread as soon as the running step has ended."""

        def job(parameters: Vector) -> None:
            began_s = time.monotonic()
            result = work(parameters)
            self.times.standstill_s += time.monotonic() - began_s
            self._hand_over(lambda: then(result))

        self._jobs.put(job)

    def aside(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` beside the training thread."""
        self._aside.submit(lambda: self._hand_over(partial(then, work())))

    def applied(self, parameters: Vector) -> None:
        """Let the trainer begin from the new model, as after a hub's answer; called in the training thread."""
        self._mean_steps = self.steps_total
        self._last_finite.note_mean()
        self._trainer.begin(parameters)

    def report(self, report: PeerReport) -> None:
        """Pass on what happened, and end once enough has."""
        now_s = time.monotonic()
        if report.event == "peer_found":
            self._has_met = self._is_connected = True
            self._to_meet.discard(report.peer)
            self._deserted = False
            self._jobs.put(_nothing)  # a trainer that waits looks again
            self._loop.call_soon(self._ping_all)
        elif report.event == "alone":
            self._is_connected = False
            self._deserted = self._has_met
            self._jobs.put(_nothing)
        elif report.event == "round_started":
            self._round_began_s = now_s
            self._snapshot_of_trained = self._trained
            if self._section.round_steps is not None:
                self._half_due_steps = self.steps_total + -(-self._section.round_steps // 2)
        elif report.event == "round_done":
            self.times.rounds += 1
            self.times.round_s += now_s - self._round_began_s
            if self._trained:  # it counts no more steps
                self._loop.call_soon(lambda: self._do(lambda: self._engine.handle(RoundHalfDue())))
        elif report.event == "round_abandoned" and self._meets and self._section.rounds_max is not None:
            self._jobs.put(self._leave_if_diverged)
        if self._ends_with(report):
            self._loop.call_soon(self.request_stop)
        self._on_report(report)

    def _ends_with(self, report: PeerReport) -> bool:
        """Return whether this was the last round, or all others have gone and no round will come."""
        if report.event == "round_done":
            return (
                self._snapshot_of_trained
                if self._section.rounds_max is None
                else self.times.rounds >= self._section.rounds_max
            )
        if report.event == "alone" and self._deserted:
            return self._trained if self._section.rounds_max is None else self._meets
        return False

    def stop(self, stop: EndPeer) -> None:
        """End."""
        self._ending.reach(stop.reason)

    # -- inside ----------------------------------------------------------------------------------------------

    def _on_message(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        self._do(lambda: self._engine.on_message(peer, header, payload))

    def _do(self, action: Callable[[], None]) -> None:
        self._driver.do(lambda: self._act(action))

    def _hand_over(self, action: Callable[[], None]) -> None:
        self._driver.do_from_thread(lambda: self._act(action))

    def _act(self, action: Callable[[], None]) -> None:
        """Let the engine act, and leave once nobody needs this device's round any more."""
        action()
        if self._leaving and not self._serves:
            self._engine.handle(PeerStopRequested())

    def _warn_from_thread(self, sentence: str) -> None:
        self._loop.call_soon_threadsafe(self._on_report, PeerReport("warning", sentence))

    def _fail_from_thread(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail_and_leave, error)

    def _fail_and_leave(self, error: BaseException) -> None:
        self._ending.fail(error)
        self._engine.handle(PeerStopRequested())  # says goodbye

    # -- the training thread ---------------------------------------------------------------------------------

    def _train(self) -> None:
        """Take local steps and do jobs between them; after the last step do jobs alone."""
        self._copy_model()
        self._do_jobs_while(lambda: bool(self._to_meet))
        self._hand_over(lambda: self._engine.handle(TrainingBegun()))
        self._trainer.begin(self.parameters)
        step = self._trainer.step
        while not self._stopping.is_set() and not self._trained:
            wanted = (
                TOLD_STEPS
                if self._section.steps_max is None
                else min(TOLD_STEPS, self._section.steps_max - self.steps_total)
            )
            try:
                done = take_local_steps(
                    self._trainer,
                    max(0, wanted),
                    should_stop=self._should_stop,
                    on_step=self._count_step,
                    step_s_min=self._section.step_s_min,
                    wait=self._stopping.wait,
                    continues=True,  # a score would go nowhere
                    step=self._awaited.in_thread(self._loop, step),
                )
            except concurrent.futures.CancelledError:
                if not self._stopping.is_set():
                    raise
                return
            if done is not None:
                self.loss = done.loss_mean if done.local_steps else self.loss
            if wanted <= 0 or done is None or done.local_steps < wanted:
                self._trained = True
        self._hand_over(self._wait_for_last_round)
        while not self._stopping.is_set():
            self._jobs.get()(self.parameters)

    def _should_stop(self) -> bool:
        """Do the jobs that wait, then return whether training has ended; called between two steps."""
        if not self._stopping.is_set():
            self._copy_model()
        with contextlib.suppress(Empty):
            while not self._stopping.is_set():
                self._jobs.get_nowait()(self.parameters)
        if (
            self._section.round_steps is not None
            and self.steps_total >= self._mean_steps + 2 * self._section.round_steps
        ):
            self._wait_for_mean()
        if self._stopping.is_set():
            return True
        self._return_if_diverged()
        return False

    def _copy_model(self) -> None:
        """Copy the model now and then if it is finite, and write the copy more seldom."""
        now_s = time.monotonic()
        if now_s >= self._copied_s + COPY_S and self._last_finite.keep(self.parameters, self.steps_total):
            self._copied_s = now_s
            if now_s > self._kept_s + KEEP_MODEL_S:
                self._keep_copy()

    def _keep_copy(self) -> None:
        """Write the copy, unless a slow disk has yet to write an earlier one."""
        assert self._last_finite.copy is not None
        vector, steps = self._last_finite.copy
        if self._keeper.begun_s is None and self._written_steps != steps:
            self._kept_s, self._written_steps = time.monotonic(), steps
            self._keep(vector, steps)

    def _return_if_diverged(self) -> None:
        """Begin the next step from the last finite model if the last step has left another."""
        if self._last_finite.restore(self.parameters):
            assert self._last_finite.copy is not None
            self._tell_diverged(f"{DIVERGED}: back at the model of step {self._last_finite.copy[1]}")
            self._keep_copy()
            if isinstance(self._trainer, ResettableTrainer):
                self._trainer.reset()
            self._trainer.begin(self.parameters)

    def _tell_diverged(self, sentence: str) -> None:
        """Tell people once that training has diverged."""
        if not self._told_diverged:
            self._warn_from_thread(sentence)
        self._told_diverged = True

    def _wait_for_mean(self) -> None:
        """Do jobs until the model moves to a mean or the others have gone; after a lease wait for the next one."""
        mean_steps = self._mean_steps
        self._do_jobs_while(lambda: self._mean_steps == mean_steps and not self._deserted)
        if self._mean_steps == mean_steps:
            self._mean_steps = COUNT_MAX

    def _do_jobs_while(self, waits: Callable[[], bool]) -> None:
        """Do jobs instead of steps for as long as something is waited for, up to a lease."""
        until_s = time.monotonic() + self._settings.lease_s
        while waits() and not self._stopping.is_set():
            try:
                self._jobs.get(timeout=max(0.0, until_s - time.monotonic()))(self.parameters)
            except Empty:
                break
        self._stepped_s = time.monotonic()

    def _leave_if_diverged(self, _: Vector) -> None:
        """End: no round takes such a model, and without a round it stays so."""
        if self.diverged:
            self._loop.call_soon_threadsafe(self.request_stop)

    def _count_step(self) -> None:
        if isinstance(self._trainer, BufferedTrainer):
            self._trainer.flush()  # any step may be the last one before a job reads the model
        self.steps_total += 1
        self._last_finite.note_step()
        self._stepped_s = time.monotonic()
        if self._half_due_steps is not None and self.steps_total >= self._half_due_steps:
            self._half_due_steps = None
            self._hand_over(lambda: self._engine.handle(RoundHalfDue()))
        if self._section.round_steps is not None and self.steps_total % self._section.round_steps == 0:
            self._hand_over(lambda: self._engine.handle(RoundDue()))

    def _wait_for_last_round(self) -> None:
        """End after one more round, or after a while without: the model to keep is the members' mean."""
        self._engine.handle(RoundDue())
        if self._section.rounds_max is None:
            wait_s = LAST_ROUND_LEASES * self._settings.lease_s
            if not self._has_met:  # others may still come in the first lease
                wait_s = max(0.0, self._begun_s + self._settings.lease_s - time.monotonic())
            self._loop.call_later(0.0 if self._deserted else wait_s, self.request_stop)

    def _end_training(self) -> None:
        """Make the training thread abandon its steps."""
        self._stopping.set()
        self._jobs.put(_nothing)
        self._awaited.cancel()
        if isinstance(self._trainer, InterruptibleTrainer):
            self._trainer.interrupt()

    def _keep(self, parameters: Vector, steps: int) -> None:
        """Write the model, in a thread of its own: a decoding that takes long must not hold it up."""
        if self._model_file is not None:
            self._keeper.submit(partial(self._write, self._model_file, parameters, steps))

    def _write(self, file: Path, parameters: Vector, steps: int) -> None:
        """Write the model, or leave the one before if training has diverged."""
        try:
            check_finite(file, parameters)
        except StorageError as error:
            self._tell_diverged(str(error))
            return
        save = partial(save_model, file, self._spec, parameters, lineage=self._member.own.name, version=steps)
        self._disk.write(save)


def longest_end_s(lease_s: float) -> float:
    """Return how long a peer may take to end once it is asked to: `run` then returns, or hangs."""
    return lease_s + 2.0 * CLOSE_S + WRITE_S


def _nothing(_: Vector) -> None:
    """Do nothing, as a job for a trainer that waits for one."""


def _core_settings(section: PeerSection, model: PeerModel, *, meets: bool) -> PeerCoreSettings:
    """Return what the core is told of a peer's settings and of its model."""
    spec = model.trainer.spec
    settings = PeerCoreSettings(
        topology=section.topology,
        lease_s=section.lease_s,
        ping_s=section.lease_s / PINGS_PER_LEASE,
        round_every_s=section.round_every_s,
        round_steps=section.round_steps,
        codec=section.codec,
        codecs=(section.codec,),
        payload_bytes_max=payload_bytes_limit(spec),
        # Rounds before the last one's first step would use `rounds_max` up.
        begins_ready=not meets or section.rounds_max is None,
        frozen=section.frozen,
        frozen_arrays=model.frozen,
    )
    return msgspec.structs.replace(settings, fingerprint=_fingerprint(spec, settings))


def _fingerprint(spec: ParameterSpec, settings: PeerCoreSettings) -> str:
    """Return what two peers share only if they have the same model, and exchange it in the same way."""
    common = (spec.fingerprint, settings.topology, settings.codec, settings.piece_bytes)
    return hashlib.sha256(msgspec.msgpack.encode(common)).hexdigest()
