"""The shell of a peer: sockets on an event loop, a thread that trains, and one that codes meanwhile."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from edgeasync.core.engine.peer_engine import PeerEngine
from edgeasync.core.peer.effects import EndPeer, PeerReport
from edgeasync.core.peer.events import PeersChanged, PeerStopRequested, RoundDue, RoundHalfDue
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.graphs.model_file import load_kept
from edgeasync.host.completion import Completion
from edgeasync.host.worker import Worker
from edgeasync.net.credentials import Credentials
from edgeasync.net.network import ZmqNetwork
from edgeasync.net.peer_finder import PeerFinder
from edgeasync.net.peer_sockets import PeerSockets
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.codecs import payload_bytes_limit
from edgeasync.protocol.messages import Frozen
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.engine_driver import EngineDriver
from edgeasync.runtime.model_keeper import WRITE_S, ModelKeeper
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.runtime.peer_training import Company, PeerTraining
from edgeasync.training.trainer import CoroutineTrainer, Trainer

CLOSE_S = 1.0
"""How long a stopping peer waits for the running local step, which it interrupts; a longer one is abandoned."""

LINGER_MS = 300
"""How long a closing peer keeps sending its goodbye."""

PINGS_PER_LEASE = 5

TICK_S = 3600.0
"""The longest time between two looks at what is due."""

LAST_ROUND_LEASES = 2.0
"""How many leases a peer that has taken its steps waits for one more round."""

PEER_MODEL_FILE = "peer.safetensors"
"""The model of a peer in its state folder; `model.safetensors` there is a hub's."""

OnReport = Callable[[PeerReport], None]
Result = TypeVar("Result")


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

    With a `file` the list is read again when the file changes. With a `hub` that is asked for the others, and what
    it says is written into the file.
    """

    own: PeerEntry
    pair: KeyPair
    peers: Peers
    incarnation: int
    file: Path | None = None
    hub: Credentials | None = None

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
        self.spec: ParameterSpec = model.trainer.spec
        """The arrays of the model."""
        self.rounds = 0
        """How many rounds it has averaged in."""
        self._member = member
        self._section = section
        self._on_report = on_report or (lambda _: None)
        self._ending = Completion("Peer")
        self._leaving = self._snapshot_of_trained = False
        self._company = Company(member.others if meets else ())
        self._keeper = ModelKeeper(
            model_file, self.spec, self.name, warn=self._warn_from_thread, fail=self._fail_from_thread
        )
        kept = model.initial, 0
        if model_file is not None:
            kept = load_kept(model_file, self.spec, model.initial)
        self.spec.check(kept[0])
        self._training = PeerTraining(
            model.trainer,
            kept,
            section,
            self._keeper,
            self._company,
            tell=lambda event: self._hand_over(lambda: self._engine.handle(event)),
            trained=lambda: self._hand_over(self._wait_for_last_round),
            fail=self._fail_from_thread,
        )
        self._aside = Worker("exchange", self._fail_from_thread)
        self._sockets: PeerSockets | None = None
        self._finder: PeerFinder | None = None
        self._settings = _core_settings(section, model, meets=meets)
        core = PeerCore(self.name, member.incarnation, member.others, self._settings)
        self._engine = PeerEngine(core, self, self.spec, time.monotonic, member.incarnation)
        self._driver = EngineDriver(
            self._ending,
            lambda: self._act(self._engine.tick),
            lambda: min(self._engine.core.next_deadline_s, time.monotonic() + TICK_S),
            self._fail_and_leave,
        )

    async def run(self) -> str:
        """Train and average until the end; return the reason.

        If its task is cancelled, the peer says goodbye as after `request_stop`. Raises `EdgeAsyncError` if it was
        called before.
        """
        self._ending.begin()
        if self._leaving:
            return "stopped"
        self._driver.begin()
        self._begun_s = time.monotonic()
        network = ZmqNetwork()
        try:
            self._sockets = self._listen(network)
            self._aside.start()
            self._keeper.start()
            self._training.begin(self._driver.loop)
            self._do(self._engine.begin)
            self._find_others(network)
            return await self._ending.wait(self.request_stop, self._settings.lease_s + CLOSE_S)
        finally:
            try:
                await self._close()
            finally:
                network.close()

    def _listen(self, network: ZmqNetwork) -> PeerSockets:
        """Listen, and connect to the others; raises `AddressError`."""
        return PeerSockets(
            self._member.own,
            self._member.pair,
            self._member.peers,
            self._settings,
            network,
            bind=self._section.bind,
            file=self._member.file,
            on_message=lambda *message: self._do(lambda: self._engine.on_message(*message)),
            on_peers=lambda names: self._do(lambda: self._engine.handle(PeersChanged(names))),
            on_trouble=self._warn,
        )

    def _find_others(self, network: ZmqNetwork) -> None:
        """Ask the hub for the others, if there is one."""
        own, _, peers, _, file, hub = self._member
        if hub is None:
            return
        assert file is not None

        def give_up(error: BaseException) -> None:
            """Do without the hub if it has told of others before."""
            if self._member.others:
                self._warn(str(error))
            else:
                self._fail_and_leave(error)

        self._finder = PeerFinder(hub, network, own, peers, file, on_trouble=self._warn, give_up=give_up)
        self._finder.begin()

    async def _close(self) -> None:
        """Let the threads end, and write the last model."""
        self._driver.cancel()
        if self._finder is not None:
            self._finder.close()
        self._training.end()
        if self._sockets is None:
            return
        try:
            await asyncio.to_thread(self._training.close, CLOSE_S)
            await asyncio.to_thread(self._aside.close, CLOSE_S)
            await asyncio.to_thread(self._keeper.close, self.parameters, self.steps_total)
        finally:
            self._sockets.close(LINGER_MS)

    # -- what people see and ask for --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This device's name in the list."""
        return self._member.own.name

    @property
    def parameters(self) -> Vector:
        """The model."""
        return self._training.parameters

    @property
    def steps_total(self) -> int:
        """Local steps of all starts."""
        return self._training.steps_total

    @property
    def loss(self) -> float | None:
        """The mean loss of the last local steps."""
        return self._training.loss

    @property
    def bytes_up(self) -> int:
        """Bytes of all messages to others."""
        return self._engine.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of all messages of others."""
        return self._engine.bytes_down

    @property
    def connected(self) -> bool:
        """Whether any other peer is live."""
        return self._company.connected

    @property
    def diverged(self) -> bool:
        """Whether the last local step has left values that are not finite."""
        return self._training.diverged

    def stalled_s(self) -> float:
        """Return for how long the trainer has not ended a local step; 0 if it has none to take."""
        if not self._ending.begun or self._ending.reached or self._training.is_trained:
            return 0.0
        return time.monotonic() - self._training.stepped_s

    def last_events(self) -> list[str]:
        """Return a line for each of the last events and effects of the core."""
        return self._engine.recorder.lines()

    def request_stop(self) -> None:
        """Say goodbye to the others and let `run` return; call it in the loop's thread.

        Others may still need what this device holds of a round whose mean it has: for that it stays up to a lease.
        Before `run` it makes `run` return at once. After `run` it does nothing.
        """
        if self._leaving:
            return
        self._leaving = True
        if self._ending.begun:
            self._driver.loop.call_later(self._settings.lease_s, self._leave)
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
        return serving is not None and (self._company.deserted or serving.state in ("applying", "serving"))

    # -- what the engine asks for -----------------------------------------------------------------------------

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting."""
        if self._sockets is not None:
            self._sockets.send(peer, header, payload)

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the training thread as soon as the running step has ended."""

        def job(parameters: Vector) -> None:
            result = work(parameters)
            self._hand_over(lambda: then(result))

        self._training.submit(job)

    def aside(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` beside the training thread."""
        self._aside.submit(lambda: self._hand_over(partial(then, work())))

    def applied(self, parameters: Vector) -> None:
        """Let the trainer begin from the new model, as after a hub's answer; called in the training thread."""
        self._training.take_mean(parameters)

    def report(self, report: PeerReport) -> None:
        """Pass on what happened, and end once enough has."""
        training, loop = self._training, self._driver.loop
        if report.event == "peer_found":
            self._company.note_found(report.peer)
            training.look_again()
            loop.call_soon(self._ping_all)
        elif report.event == "alone":
            self._company.connected = False
            training.look_again()
        elif report.event == "round_started":
            self._snapshot_of_trained = training.is_trained
            training.note_round()
        elif report.event == "round_done":
            self.rounds += 1
            if training.is_trained:  # it counts no more steps
                loop.call_soon(lambda: self._do(lambda: self._engine.handle(RoundHalfDue())))
        elif report.event == "round_abandoned" and self._company.meets and self._section.rounds_max is not None:
            training.submit(self._leave_if_diverged)
        if self._ends_with(report):
            loop.call_soon(self.request_stop)
        self._on_report(report)

    def _ends_with(self, report: PeerReport) -> bool:
        """Return whether this was the last round, or all others have gone and no round will come."""
        rounds_max = self._section.rounds_max
        if report.event == "round_done":
            return self._snapshot_of_trained if rounds_max is None else self.rounds >= rounds_max
        if report.event == "alone" and self._company.deserted:
            return self._training.is_trained if rounds_max is None else self._company.meets
        return False

    def stop(self, stop: EndPeer) -> None:
        """End."""
        self._ending.reach(stop.reason)

    # -- inside ----------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        self._driver.do(lambda: self._act(action))

    def _hand_over(self, action: Callable[[], None]) -> None:
        self._driver.do_from_thread(lambda: self._act(action))

    def _act(self, action: Callable[[], None]) -> None:
        """Let the engine act, and leave once nobody needs this device's round any more."""
        action()
        if self._leaving and not self._serves:
            self._engine.handle(PeerStopRequested())

    def _warn(self, sentence: str) -> None:
        self.report(PeerReport("warning", sentence))

    def _warn_from_thread(self, sentence: str) -> None:
        self._driver.loop.call_soon_threadsafe(self._on_report, PeerReport("warning", sentence))

    def _fail_from_thread(self, error: BaseException) -> None:
        self._driver.loop.call_soon_threadsafe(self._fail_and_leave, error)

    def _fail_and_leave(self, error: BaseException) -> None:
        self._ending.fail(error)
        self._engine.handle(PeerStopRequested())  # says goodbye

    def _leave_if_diverged(self, _: Vector) -> None:
        """End: no round takes such a model, and without a round it stays so. Called between two steps."""
        if self.diverged:
            self._driver.loop.call_soon_threadsafe(self.request_stop)

    def _wait_for_last_round(self) -> None:
        """End after one more round, or after a while without: the model to keep is the members' mean."""
        self._engine.handle(RoundDue())
        if self._section.rounds_max is None:
            wait_s = LAST_ROUND_LEASES * self._settings.lease_s
            if not self._company.has_met:  # others may still come in the first lease
                wait_s = max(0.0, self._begun_s + self._settings.lease_s - time.monotonic())
            self._driver.loop.call_later(0.0 if self._company.deserted else wait_s, self.request_stop)


def longest_end_s(lease_s: float) -> float:
    """Return how long a peer may take to end once it is asked to: `run` then returns, or hangs."""
    return lease_s + 2.0 * CLOSE_S + WRITE_S


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
