"""Connects frames to `PeerCore`: decodes messages, holds the arrays of a round, carries effects out. No I/O."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np

from edgeasync.core.arrays.peer_round import NotFiniteError, PeerRound
from edgeasync.core.engine.recorder import Recorder
from edgeasync.core.peer.effects import (
    ApplyMean,
    Decode,
    DropRound,
    Encode,
    EndPeer,
    ForwardPayload,
    OpenPayload,
    PeerEffect,
    PeerReport,
    ReleasePayload,
    SendPiece,
    SendToPeer,
    StorePiece,
    TakeSnapshot,
)
from edgeasync.core.peer.events import (
    Decoded,
    Encoded,
    MeanApplied,
    PeerEvent,
    PeerReceived,
    PeerReceivedMalformed,
    SnapshotTaken,
    WorkEvent,
    WorkFailed,
)
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.errors import ProtocolError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.peer_messages import PEER_MESSAGES, PeerMessage, PeerPiece, RoundId

HEADER_BYTES_MAX = 1 << 14
"""The longest header that a peer reads: the longest message names 64 members."""

Result = TypeVar("Result")


class PeerShell(Protocol):
    """The I/O and the threads that the engine of a peer asks for.

    Use the engine from one thread. Call `begin`, then `on_message` for every message, `handle` with what people
    and the trainer ask for, and `tick` when `next_deadline_s` is due, which every call may change. Call each
    `then` on the engine's thread, never from inside a call of the engine.
    """

    def send(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting, or drop it if there is no connection."""

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Give the model to `work` between two local steps, in order; then call `then` with its result."""

    def aside(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` while training continues, in order and one at a time; then call `then` with its result."""

    def applied(self, parameters: Vector) -> None:
        """Let the trainer begin from the model, which has moved to a mean; called between the same two steps."""

    def report(self, report: PeerReport) -> None:
        """Tell the person at the device."""

    def stop(self, stop: EndPeer) -> None:
        """End, after what was sent last has left."""


class _Payloads:
    """The arrays and payloads of the round that this device is in."""

    def __init__(self) -> None:
        self.arrays: PeerRound | None = None
        self.outgoing: dict[int, wire.Buffer] = {}
        self.incoming: dict[int, bytearray] = {}
        self.checksums: dict[int, int] = {}


class PeerEngine:
    """Frames in, frames out. It reads the time from `now_s`; no call blocks for longer than a copy of a piece.

    `random_seed` is for codecs that round stochastically. `bytes_up` and `bytes_down` count all messages.
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
        self._rounds: dict[RoundId, _Payloads] = {}
        self._piece: wire.Buffer = b""

    def begin(self) -> None:
        """Say hello to all peers."""
        now_s = self._now_s()
        self.recorder.begin(now_s, "begin")
        self._execute(self.core.begin(now_s))

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due."""
        return self.core.next_deadline_s

    def tick(self) -> None:
        """Do what is due."""
        now_s = self._now_s()
        self.recorder.begin(now_s, "tick")
        self._execute(self.core.tick(now_s))

    def handle(self, event: PeerEvent) -> None:
        """Give the core an event and carry out what follows."""
        now_s = self._now_s()
        self.recorder.begin(now_s, event)
        self._execute(self.core.handle(event, now_s))

    def on_message(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        """Handle one message that came under the key of `peer`."""
        self.bytes_down += len(header) + len(payload or b"")
        try:
            message = _read(header, payload)
        except wire.UnsupportedVersionError as error:
            self.handle(PeerReceivedMalformed(peer, error.to_refuse().sentence))
            return
        except ProtocolError as error:
            self.handle(PeerReceivedMalformed(peer, str(error)))
            return
        if not isinstance(message, PeerPiece):
            self.handle(PeerReceived(peer, message))
            return
        assert payload is not None
        self._piece = payload
        self.handle(PeerReceived(peer, message, len(payload), sound=wire.checksum(payload) == message.checksum))
        self._piece = b""

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, effects: list[PeerEffect]) -> None:
        self.recorder.end(effects)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case SendToPeer():
                self._send(effect.peer, wire.encode(effect.message), None)
            case SendPiece():
                self._send_piece(effect)
            case PeerReport():
                self._shell.report(effect)
            case EndPeer():
                self._shell.stop(effect)
            case DropRound():
                self._rounds.pop(effect.round, None)
            case ForwardPayload():
                self._of(effect.round).outgoing[effect.step] = self._of(effect.round).incoming[
                    effect.received_step
                ]
            case OpenPayload():
                self._of(effect.round).incoming[effect.step] = bytearray(effect.payload_bytes)
                self._of(effect.round).checksums[effect.step] = effect.checksum
            case StorePiece():
                buffer, end = self._of(effect.round).incoming[effect.step], effect.offset + len(self._piece)
                assert end <= len(buffer)
                buffer[effect.offset : end] = self._piece
            case ReleasePayload():
                payloads = self._of(effect.round)
                (payloads.incoming if effect.incoming else payloads.outgoing).pop(effect.step, None)
            case _:
                self._begin_work(effect)

    def _of(self, round_id: RoundId) -> _Payloads:
        return self._rounds[round_id]

    def _send(self, peer: str, header: bytes, payload: wire.Buffer | None) -> None:
        self.bytes_up += len(header) + len(payload or b"")
        self._shell.send(peer, header, payload)

    def _send_piece(self, effect: SendPiece) -> None:
        whole = memoryview(self._of(effect.round).outgoing[effect.step])
        piece = whole[effect.offset : effect.offset + effect.length]
        message = PeerPiece(effect.round, effect.step, effect.offset, wire.checksum(piece))
        self._send(effect.peer, wire.encode(message), piece)

    # -- work ------------------------------------------------------------------------------------------------

    def _begin_work(self, effect: TakeSnapshot | Encode | Decode | ApplyMean) -> None:
        match effect:
            case TakeSnapshot():
                self._rounds[effect.round] = payloads = _Payloads()
                take = partial(_take_snapshot, effect, payloads, self._spec.trained_length)
                self._shell.between_steps(partial(_attempt, effect.round, take), self.handle)
            case ApplyMean():
                arrays = self._arrays(effect.round)
                apply = partial(_apply, effect, arrays, self._shell.applied)
                self._shell.between_steps(partial(_attempt, effect.round, apply), self.handle)
            case Encode():
                encode = partial(_encode, effect, self._arrays(effect.round), self._random)
                self._shell.aside(partial(_attempt, effect.round, encode), partial(self._encoded, effect))
            case Decode():
                payloads = self._of(effect.round)
                payload = (payloads.outgoing if effect.own else payloads.incoming)[effect.step]
                checksum = None if effect.own else payloads.checksums[effect.step]
                decode = partial(_decode, effect, self._arrays(effect.round), payload, checksum)
                self._shell.aside(partial(_attempt, effect.round, decode), self.handle)

    def _arrays(self, round_id: RoundId) -> PeerRound:
        arrays = self._of(round_id).arrays
        assert arrays is not None
        return arrays

    def _encoded(self, effect: Encode, result: tuple[wire.Buffer, int] | WorkFailed) -> None:
        if isinstance(result, WorkFailed):
            self.handle(result)
            return
        payload, checksum = result
        if (payloads := self._rounds.get(effect.round)) is not None:
            payloads.outgoing[effect.step] = payload
        self.handle(Encoded(effect.round, effect.step, len(payload), checksum))


def _read(header: bytes, payload: wire.Buffer | None) -> PeerMessage:
    """Return a message; raises `ProtocolError` for what is none, and for a payload where none belongs."""
    message = cast("PeerMessage", wire.decode(header, HEADER_BYTES_MAX, PEER_MESSAGES))
    if isinstance(message, PeerPiece) != (payload is not None):
        raise ProtocolError("a piece without its bytes, or bytes without a piece")
    return message


def _attempt(round_id: RoundId, work: Callable[..., Result], *arguments: object) -> Result | WorkFailed:
    try:
        return work(*arguments)
    except (NotFiniteError, MemoryError) as error:
        return WorkFailed(round_id, str(error) or "this device has not the memory for a round")


def _take_snapshot(
    effect: TakeSnapshot, payloads: _Payloads, trained_length: int, parameters: Vector
) -> WorkEvent:
    proposal = effect.proposal
    payloads.arrays = arrays = PeerRound(
        parameters,
        effect.segments,
        len(proposal.members),
        proposal.codec,
        ring=proposal.topology == "ring",
        trained_length=trained_length,
    )
    return SnapshotTaken(effect.round, arrays.norms)


def _apply(
    effect: ApplyMean,
    arrays: PeerRound,
    applied: Callable[[Vector], None],
    parameters: Vector,
) -> WorkEvent:
    arrays.apply(parameters)
    applied(parameters)
    return MeanApplied(effect.round)


def _encode(effect: Encode, arrays: PeerRound, random: np.random.Generator) -> tuple[wire.Buffer, int]:
    payload = arrays.encode(effect.segment, effect.source, random)
    return payload, wire.checksum(payload)


def _decode(effect: Decode, arrays: PeerRound, payload: wire.Buffer, checksum: int | None) -> WorkEvent:
    sound = checksum is None or wire.checksum(payload) == checksum
    norms = arrays.decode(payload, effect.segment, effect.way) if sound else None
    if norms is None:
        return Decoded(effect.round, effect.step, sound=False)
    return Decoded(effect.round, effect.step, norms=norms)
