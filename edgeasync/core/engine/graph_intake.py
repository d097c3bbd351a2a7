"""Receives a device's training graph and its base. Part of `DeviceEngine`.

A graph is received into memory. The pieces of a base are written to disk in the background. Each is
credited once it is written, so a base uses memory only for the pieces of one window.
"""

from collections.abc import Callable
from functools import partial

from edgeasync.core.device import effects, events
from edgeasync.core.engine.device_shell import DeviceShell, DeviceTraining
from edgeasync.core.engine.device_transfers import DeviceTransfers
from edgeasync.errors import StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.graph import Base, fingerprint_of
from edgeasync.protocol.messages import Credit, GraphHeader

Handle = Callable[[events.DeviceEvent], None]


class GraphIntake:
    """Looks for the graph and the base, receives them, and reports to the core with `handle`."""

    def __init__(
        self, shell: DeviceShell, training: DeviceTraining, transfers: DeviceTransfers, handle: Handle
    ) -> None:
        self._shell = shell
        self._training = training
        self._transfers = transfers
        self._handle = handle
        self._received_bytes = 0
        """The bytes of the base that are stored, or are being stored."""
        self._failures = 0

    def carry_out(self, effect: effects.GraphEffect) -> None:
        """Look for the graph or the base in the background, or open the transfer of the base."""
        match effect:
            case effects.FindGraph():
                self._training.run(partial(_find_graph, self._shell, effect.fingerprint), self._handle)
            case effects.FindBase():
                self._training.run(partial(_find_base, self._shell, effect.base), self._found)
            case effects.TakeGraph():
                self._receive_base(effect.graph)

    def _found(self, event: events.DeviceEvent) -> None:
        if isinstance(event, events.GraphMissing):
            self._received_bytes = event.stored_bytes
        self._handle(event)

    def _receive_base(self, header: GraphHeader) -> None:
        """Open the transfer of the base, from the first byte that is not stored."""
        if not header.transfer:
            self._transfers.drop_incoming()
            self._handle(events.GraphBroken("the hub sent its base at once instead of in pieces"))
            return
        self._transfers.receive(header, self._received_bytes)

    def store(self, header: GraphHeader, part: wire.Buffer, credit: Credit) -> None:
        """Write a piece of the base in the background, then credit it."""
        offset, self._received_bytes = self._received_bytes, credit.received_bytes
        base = Base(header.fingerprint, header.payload_bytes)
        if credit.received_bytes == base.nbytes:
            self._handle(events.GraphArrived())
        stored = partial(self._stored, header, credit, len(part), self._failures)
        self._training.run(partial(_append, self._shell, base, offset, part), stored)

    def _stored(self, header: GraphHeader, credit: Credit, nbytes: int, failures: int, trouble: str) -> None:
        if failures != self._failures:
            return  # an earlier piece could not be stored
        if trouble:
            self._failures += 1
            self._transfers.drop_incoming()
            self._handle(events.GraphBroken(trouble))
            return
        self._transfers.credit_stored(credit, nbytes)
        if credit.received_bytes == header.payload_bytes:
            self._training.run(partial(_finish, self._shell, header), self._handle)

    def keep(self, header: GraphHeader, payload: wire.Buffer) -> None:
        """Verify and store a complete graph in the background."""
        self._handle(events.GraphArrived())
        self._training.run(partial(_keep_graph, self._shell, header.fingerprint, payload), self._handle)


def _find_graph(shell: DeviceShell, fingerprint: str) -> events.DeviceEvent:
    """Check whether a graph was stored before a restart."""
    return events.GraphHeld(fetched=False) if shell.has_graph(fingerprint) else events.GraphMissing()


def _keep_graph(shell: DeviceShell, fingerprint: str, payload: wire.Buffer) -> events.DeviceEvent:
    """Store a graph if its fingerprint equals the announced fingerprint."""
    if fingerprint_of(payload) != fingerprint:
        return events.GraphForged()
    shell.keep_graph(fingerprint, bytes(payload))
    return events.GraphHeld(fetched=True)


def _find_base(shell: DeviceShell, base: Base) -> events.DeviceEvent:
    """Check how much of a base is stored."""
    try:
        stored_bytes = shell.bases.find(base)
    except StorageError as error:
        return events.GraphBroken(str(error))
    if stored_bytes is None:
        return events.GraphLocked()
    return events.GraphHeld(fetched=False) if stored_bytes == base.nbytes else events.GraphMissing(stored_bytes)


def _append(shell: DeviceShell, base: Base, offset: int, part: wire.Buffer) -> str:
    """Store a piece; return "" or why it could not be stored."""
    try:
        shell.bases.append(base, offset, part)
    except StorageError as error:
        return str(error)
    return ""


def _finish(shell: DeviceShell, header: GraphHeader) -> events.DeviceEvent:
    """Verify the stored base."""
    try:
        is_announced = shell.bases.finish(Base(header.fingerprint, header.payload_bytes), header.checksum)
    except StorageError as error:
        return events.GraphBroken(str(error))
    return events.GraphHeld(fetched=True) if is_announced else events.GraphForged()
