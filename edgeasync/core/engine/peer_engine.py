"""Connects frames to `PeerCore`: messages, arrays and effects. No I/O."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np

from edgeasync.core.arrays.peer_round import NotFiniteError, PeerRound
from edgeasync.core.engine.recorder import Recorder
from edgeasync.core.peer import effects, events
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.errors import ProtocolError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.peer_messages import PEER_MESSAGES, PeerMessage, PeerPiece, RoundId

HEADER_BYTES_MAX = 1 << 14
"""Maximum header length. The longest message lists 64 members."""

Result = TypeVar("Result")


class PeerShell(Protocol):
    """The I/O and threads of a peer's engine.

    Call the engine from one thread: first `begin`, then

    - `on_message` for every message,
    - `handle` with requests of users and the trainer,
    - `tick` at the time that `next_deadline_s` returns, which may change with every call.

    Call each `then` on the engine's thread, and never inside a call of the engine.
    """

    def send(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without blocking; drop it if the peer is not connected."""

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Run `work` on the model between two local steps, then call `then` with its result."""

    def aside(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in order while training continues, then call `then` with its result."""

    def applied(self, parameters: Vector) -> None:
        """Restart the trainer from the averaged model, before its next local step."""

    def report(self, report: effects.PeerReport) -> None:
        """Report an event to the user of the device."""

    def stop(self, stop: effects.EndPeer) -> None:
        """End after all sent messages were transmitted."""


class _HeldRound:
    """The arrays and payloads of one of this device's rounds.

    Its methods are background jobs, and each returns an event.
    """

    def __init__(
        self, trained_length: int, random: np.random.Generator, applied: Callable[[Vector], None]
    ) -> None:
        self.outgoing: dict[int, wire.Buffer] = {}
        self.incoming: dict[int, bytearray] = {}
        self.checksums: dict[int, int] = {}
        self._trained_length = trained_length
        self._random = random
        self._applied = applied

    def take_snapshot(self, effect: effects.TakeSnapshot, parameters: Vector) -> events.WorkEvent:
        proposal = effect.proposal
        self._arrays = PeerRound(
            parameters,
            effect.segments,
            len(proposal.members),
            proposal.codec,
            ring=proposal.topology == "ring",
            trained_length=self._trained_length,
        )
        return events.SnapshotTaken(effect.round, self._arrays.norms)

    def encode(self, effect: effects.Encode) -> events.WorkEvent:
        payload = self.outgoing[effect.step] = self._arrays.encode(effect.segment, effect.source, self._random)
        return events.Encoded(effect.round, effect.step, len(payload), wire.checksum(payload))

    def decode(self, effect: effects.Decode) -> events.WorkEvent:
        payload = (self.outgoing if effect.own else self.incoming)[effect.step]
        sound = effect.own or wire.checksum(payload) == self.checksums[effect.step]
        norms = self._arrays.decode(payload, effect.segment, effect.way) if sound else None
        if norms is None:
            return events.Decoded(effect.round, effect.step, sound=False)
        return events.Decoded(effect.round, effect.step, norms=norms)

    def apply(self, effect: effects.ApplyMean, parameters: Vector) -> events.WorkEvent:
        self._arrays.apply(parameters)
        self._applied(parameters)
        return events.MeanApplied(effect.round)


class PeerEngine:
    """Converts frames to events, and effects to frames. The shell creates it.

    It reads the time from `now_s`. No call blocks for longer than it takes to copy a piece. Codecs
    that round stochastically use `random_seed`. `bytes_up` and `bytes_down` count the bytes of all
    messages.
    """

    def __init__(
        self,
        core: PeerCore,
        shell: PeerShell,
        spec: ParameterSpec,
        now_s: Callable[[], float],
        random_seed: int = 0,
    ) -> None:
        self.core = core
        self.recorder = Recorder()
        self.bytes_up = self.bytes_down = 0
        self._shell = shell
        self._spec = spec
        self._now_s = now_s
        self._random = np.random.Generator(np.random.PCG64(random_seed))
        self._rounds: dict[RoundId, _HeldRound] = {}
        self._piece: wire.Buffer = b""

    def begin(self) -> None:
        """Send a `hello` to all peers."""
        self._execute(self.core.begin(self._note("begin")))

    def tick(self) -> None:
        """Process what is due."""
        self._execute(self.core.tick(self._note("tick")))

    def handle(self, event: events.PeerEvent) -> None:
        """Pass an event to the core, and execute the effects."""
        self._execute(self.core.handle(event, self._note(event)))

    def _note(self, event: object) -> float:
        """Record an event before the core handles it; return the time."""
        now_s = self._now_s()
        self.recorder.begin(now_s, event)
        return now_s

    def on_message(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        """Process one message that was received under the key of `peer`."""
        self.bytes_down += len(header) + len(payload or b"")
        try:
            message = _read(header, payload)
        except wire.UnsupportedVersionError as error:
            self.handle(events.PeerReceivedMalformed(peer, error.to_refuse().sentence))
            return
        except ProtocolError as error:
            self.handle(events.PeerReceivedMalformed(peer, str(error)))
            return
        if not isinstance(message, PeerPiece):
            self.handle(events.PeerReceived(peer, message))
            return
        assert payload is not None
        self._piece = payload
        sound = wire.checksum(payload) == message.checksum
        self.handle(events.PeerReceived(peer, message, len(payload), sound=sound))
        self._piece = b""

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, decided: list[effects.PeerEffect]) -> None:
        self.recorder.end(decided)
        for effect in decided:
            self._carry_out(effect)

    def _carry_out(self, effect: effects.PeerEffect) -> None:
        match effect:
            case effects.SendToPeer():
                self._send(effect.peer, wire.encode(effect.message), None)
            case effects.SendPiece():
                self._send_piece(effect)
            case effects.PeerReport():
                self._shell.report(effect)
            case effects.EndPeer():
                self._shell.stop(effect)
            case effects.DropRound():
                self._rounds.pop(effect.round, None)
            case effects.ForwardPayload():
                held = self._rounds[effect.round]
                held.outgoing[effect.step] = held.incoming[effect.received_step]
            case effects.OpenPayload():
                held = self._rounds[effect.round]
                held.incoming[effect.step] = bytearray(effect.payload_bytes)
                held.checksums[effect.step] = effect.checksum
            case effects.StorePiece():
                buffer, end = self._rounds[effect.round].incoming[effect.step], effect.offset + len(self._piece)
                assert end <= len(buffer)
                buffer[effect.offset : end] = self._piece
            case effects.ReleasePayload():
                held = self._rounds[effect.round]
                (held.incoming if effect.incoming else held.outgoing).pop(effect.step, None)
            case _:
                self._begin_work(effect)

    def _send(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        self.bytes_up += len(header) + len(payload or b"")
        self._shell.send(peer, header, payload)

    def _send_piece(self, effect: effects.SendPiece) -> None:
        whole = memoryview(self._rounds[effect.round].outgoing[effect.step])
        piece = whole[effect.offset : effect.offset + effect.length]
        message = PeerPiece(effect.round, effect.step, effect.offset, wire.checksum(piece))
        self._send(effect.peer, wire.encode(message), piece)

    # -- work ------------------------------------------------------------------------------------------------

    def _begin_work(self, effect: effects.WorkEffect) -> None:
        if isinstance(effect, effects.TakeSnapshot):
            held = _HeldRound(self._spec.trained_length, self._random, self._shell.applied)
            self._rounds[effect.round] = held
        held = self._rounds[effect.round]
        match effect:
            case effects.TakeSnapshot():
                self._shell.between_steps(partial(_attempt, held.take_snapshot, effect), self.handle)
            case effects.ApplyMean():
                self._shell.between_steps(partial(_attempt, held.apply, effect), self.handle)
            case effects.Encode():
                self._shell.aside(partial(_attempt, held.encode, effect), self.handle)
            case effects.Decode():
                self._shell.aside(partial(_attempt, held.decode, effect), self.handle)


def _read(header: bytes, payload: wire.Buffer | None) -> PeerMessage:
    """Decode a message; raises `ProtocolError` if it is invalid."""
    message = cast("PeerMessage", wire.decode(header, HEADER_BYTES_MAX, PEER_MESSAGES))
    if isinstance(message, PeerPiece) != (payload is not None):
        raise ProtocolError("a piece must have a payload, and other messages must not")
    return message


def _attempt(
    work: Callable[..., events.WorkEvent], effect: effects.WorkEffect, *parameters: Vector
) -> events.WorkEvent:
    """Run a job; return its event, or a failure event if the device cannot run it."""
    try:
        return work(effect, *parameters)
    except (NotFiniteError, MemoryError) as error:
        return events.WorkFailed(effect.round, str(error) or "not enough memory for a round on this device")
