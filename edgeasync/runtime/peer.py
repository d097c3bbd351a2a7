"""A peer's shell, with sockets on an event loop, a training thread and an encoding thread."""

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
"""Seconds that a stopping peer waits for the interrupted local step before it abandons the step."""

LINGER_MS = 300
"""Maximum milliseconds that a closing peer tries to send its goodbye."""

PINGS_PER_LEASE = 5

TICK_S = 3600.0
"""Maximum seconds between two checks for due work."""

LAST_ROUND_LEASES = 2.0
"""Number of leases that a peer waits for one more round after its last local step."""

PEER_MODEL_FILE = "peer.safetensors"
"""The name of a peer's model file in its state folder; a hub's model is `model.safetensors`."""

OnReport = Callable[[PeerReport], None]
Result = TypeVar("Result")


class PeerModel(NamedTuple):
    """The model of a peer: its trainer, its initial values and, for ONNX, the forward model.

    `frozen` is the checksum of the model's frozen arrays.
    """

    trainer: Trainer | CoroutineTrainer
    initial: Vector
    forward: bytes | None = None
    frozen: Frozen | None = None


class PeerMember(NamedTuple):
    """A peer as a member of its list: its entry, its keys, its incarnation and the list.

    If `file` is set, the list is read again when the file changes. If `hub` is set, the peer asks
    this hub for the other peers, and writes the answer to the file.
    """

    own: PeerEntry
    pair: KeyPair
    peers: Peers
    incarnation: int
    file: Path | None = None
    hub: Credentials | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all other peers in the list."""
        return tuple(entry.name for entry in self.peers.peer if entry.name != self.own.name)


class PeerRuntime:
    """Trains on this device without a hub, and averages the model with the models of other peers.

    `run` trains and averages, and returns the reason why it ended. It can be called only once per
    peer. It ends when `request_stop` is called or after `rounds_max` rounds. If `rounds_max` is not
    set, it ends after `steps_max` local steps and one more round. The caller converts `epochs` to
    local steps.

    - `model.trainer` trains the model in place.
    - If `round_steps` is set, the peer pauses training after twice that number of local steps
      without a new mean. The pause lasts at most a lease.
    - The peer writes the model to `model_file` once a minute and at the end, without the changes of
      an abandoned step. If the file exists at the start, the peer resumes with the file's model and
      number of local steps.
    - If `meets` is true, the peer takes its first step once it has found all other peers in the
      list, or after a lease. With `meets`, the peer also ends before `rounds_max` rounds if all
      other peers have left or its own training has diverged.
    - If a step makes the model non-finite, the next step starts from the last finite copy of the
      model. This copy is also written to `model_file`.

    The constructor raises `StorageError` or `ModelMismatchError` if it cannot resume from
    `model_file`. `run` raises `AddressError` if it cannot listen on the address. It also raises
    exceptions that the trainer raises.
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
        """The number of rounds in which this peer has averaged its model."""
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

        If its task is cancelled, the peer sends its goodbye, as after `request_stop`. Raises
        `EdgeAsyncError` if `run` was called before.
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
        """Listen, and connect to the other peers; raises `AddressError`."""
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
        """Ask the hub for the other peers, if a hub is set."""
        own, _, peers, _, file, hub = self._member
        if hub is None:
            return
        assert file is not None

        def give_up(error: BaseException) -> None:
            """Continue without the hub if it has already reported other peers, otherwise fail."""
            if self._member.others:
                self._warn(str(error))
            else:
                self._fail_and_leave(error)

        self._finder = PeerFinder(hub, network, own, peers, file, on_trouble=self._warn, give_up=give_up)
        self._finder.begin()

    async def _close(self) -> None:
        """End the threads, and write the last model."""
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

    # -- public state and requests ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This device's name in the list of peers."""
        return self._member.own.name

    @property
    def parameters(self) -> Vector:
        """The model's current parameters."""
        return self._training.parameters

    @property
    def steps_total(self) -> int:
        """The number of local steps that this device has taken over all starts."""
        return self._training.steps_total

    @property
    def loss(self) -> float | None:
        """The mean loss of the latest local steps."""
        return self._training.loss

    @property
    def bytes_up(self) -> int:
        """Total bytes of the messages sent to other peers."""
        return self._engine.bytes_up

    @property
    def bytes_down(self) -> int:
        """Total bytes of the messages received from other peers."""
        return self._engine.bytes_down

    @property
    def connected(self) -> bool:
        """Whether any other peer is live."""
        return self._company.connected

    @property
    def diverged(self) -> bool:
        """Whether the last local step has made the model non-finite."""
        return self._training.diverged

    def stalled_s(self) -> float:
        """Return the seconds since the last local step ended, or 0 if no step is due."""
        if not self._ending.begun or self._ending.reached or self._training.is_trained:
            return 0.0
        return time.monotonic() - self._training.stepped_s

    def last_events(self) -> list[str]:
        """Return one line per recent event and effect of the core."""
        return self._engine.recorder.lines()

    def request_stop(self) -> None:
        """Send the other peers a goodbye, and let `run` return. Call it on the event loop.

        Other peers may still need this device for the current round, so `run` may take up to a
        lease to return. If `run` is called later, it returns at once. After `run` has returned,
        this method does nothing.
        """
        if self._leaving:
            return
        self._leaving = True
        if self._ending.begun:
            self._driver.loop.call_later(self._settings.lease_s, self._leave)
            self._do(lambda: None)

    def _ping_all(self) -> None:
        """Send all peers a ping with the names of the peers whose messages this device receives.

        A round requires that all its peers receive each other's messages.
        """
        if self._sockets is not None:
            names = self._sockets.peers
            self._do(lambda: self._engine.handle(PeersChanged(names)))

    def _leave(self) -> None:
        self._do(lambda: self._engine.handle(PeerStopRequested()))

    @property
    def _serves(self) -> bool:
        """Whether other peers may still need this device for the current round.

        They may need the round's mean from this device, or the data that the mean is computed from.
        If all other peers have left, this is true during any round: they must have sent a goodbye,
        because otherwise the core would have abandoned the round.
        """
        serving = self._engine.core.rounds.current
        return serving is not None and (self._company.deserted or serving.state in ("applying", "serving"))

    # -- interface for the engine -----------------------------------------------------------------------------

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting."""
        if self._sockets is not None:
            self._sockets.send(peer, header, payload)

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the training thread as soon as the current step has ended."""

        def job(parameters: Vector) -> None:
            result = work(parameters)
            self._hand_over(lambda: then(result))

        self._training.submit(job)

    def aside(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the encoding thread."""
        self._aside.submit(lambda: self._hand_over(partial(then, work())))

    def applied(self, parameters: Vector) -> None:
        """Let the trainer continue from the new model. Called in the training thread."""
        self._training.take_mean(parameters)

    def report(self, report: PeerReport) -> None:
        """Pass a report to the callback, and stop the peer if this report ends it."""
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
            if training.is_trained:  # no more steps trigger a round
                loop.call_soon(lambda: self._do(lambda: self._engine.handle(RoundHalfDue())))
        elif report.event == "round_abandoned" and self._company.meets and self._section.rounds_max is not None:
            training.submit(self._leave_if_diverged)
        if self._ends_with(report):
            loop.call_soon(self.request_stop)
        self._on_report(report)

    def _ends_with(self, report: PeerReport) -> bool:
        """Return whether the report is about the last round, or no further round is possible."""
        rounds_max = self._section.rounds_max
        if report.event == "round_done":
            return self._snapshot_of_trained if rounds_max is None else self.rounds >= rounds_max
        if report.event == "alone" and self._company.deserted:
            return self._training.is_trained if rounds_max is None else self._company.meets
        return False

    def stop(self, stop: EndPeer) -> None:
        """Make `run` return this reason."""
        self._ending.reach(stop.reason)

    # -- inside ----------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        self._driver.do(lambda: self._act(action))

    def _hand_over(self, action: Callable[[], None]) -> None:
        self._driver.do_next(lambda: self._act(action))

    def _act(self, action: Callable[[], None]) -> None:
        """Run `action`, and leave if a stop was requested and no other peer needs this device."""
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
        self._engine.handle(PeerStopRequested())  # sends the goodbye

    def _leave_if_diverged(self, _: Vector) -> None:
        """Stop if training has diverged, because rounds reject such a model. Called between two steps."""
        if self.diverged:
            self._driver.loop.call_soon_threadsafe(self.request_stop)

    def _wait_for_last_round(self) -> None:
        """Stop after one more round or a timeout.

        After such a round, the final model is the mean of the peers' models.
        """
        self._engine.handle(RoundDue())
        if self._section.rounds_max is None:
            wait_s = LAST_ROUND_LEASES * self._settings.lease_s
            if not self._company.has_met:  # others may still join in the first lease
                wait_s = max(0.0, self._begun_s + self._settings.lease_s - time.monotonic())
            self._driver.loop.call_later(0.0 if self._company.deserted else wait_s, self.request_stop)


def longest_end_s(lease_s: float) -> float:
    """Return the maximum seconds that a peer may take to end after a stop request."""
    return lease_s + 2.0 * CLOSE_S + WRITE_S


def _core_settings(section: PeerSection, model: PeerModel, *, meets: bool) -> PeerCoreSettings:
    """Return the settings of a peer's core."""
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
        # Rounds before the first step of the last peer would count towards `rounds_max`.
        begins_ready=not meets or section.rounds_max is None,
        frozen=section.frozen,
        frozen_arrays=model.frozen,
    )
    return msgspec.structs.replace(settings, fingerprint=_fingerprint(spec, settings))


def _fingerprint(spec: ParameterSpec, settings: PeerCoreSettings) -> str:
    """Return a digest that is equal on two peers only if they can average their models."""
    common = (spec.fingerprint, settings.topology, settings.codec, settings.piece_bytes)
    return hashlib.sha256(msgspec.msgpack.encode(common)).hexdigest()
