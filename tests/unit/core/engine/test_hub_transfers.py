"""The hub's transfers by themselves: whatever happens to them, where each is kept agrees with its state."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeasync.core.engine.hub_transfers import SUSPENDED_S, IncomingTransfers, OutgoingTransfers
from edgeasync.core.hub.member import Member
from edgeasync.errors import ProtocolError
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Credit, DeviceProfile, GraphHeader, ModelVersion, Piece, Push

PIECE = 1 << 16
PAYLOADS = [bytes(range(256)) * 1024, bytes(range(255, -1, -1)) * 1024]
VERSION = ModelVersion("0" * 16, 0)
SUSPENDED_MAX = 1

CONNECTIONS = [b"0", b"1", b"2"]
PEERS = st.sampled_from(CONNECTIONS)
OWNERS = st.sampled_from([("a", b"a"), ("a", b"a"), ("b", b"b")])


class HubTransfersMachine(RuleBasedStateMachine):
    """Devices that announce, send, credit, fetch, fall silent and come back, as they like."""

    @initialize()
    def start(self):
        self.now_s = 0.0
        self.count = 0
        self.transfers = []
        self.payloads = {}
        self.make()

    @rule(seconds=st.sampled_from([0.1, 5.0, SUSPENDED_S / 2]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule()
    def connections_are_cut(self):
        for peer in CONNECTIONS:
            self.cut(peer)
        assert not self.hub._active
        assert not getattr(self.hub, "_partials", None)

    def cut(self, peer):
        active = self.hub._active.get(peer)
        self.hub.suspend(peer, self.now_s)
        if active is not None and active.transfer.state == "suspended":
            assert list(self.hub._suspended.items())[-1] == (active.owner, active)
            assert active.moved_s == self.now_s

    @rule(owner=OWNERS)
    def device_sends_something_else(self, owner):
        self.hub.drop_suspended(owner)
        assert owner not in self.hub._suspended

    @rule(spare=st.none() | OWNERS)
    def room_is_needed(self, spare):
        before = dict(self.hub._suspended)
        dropped = self.hub.drop_oldest_suspended(spare)
        others = [owner for owner in before if owner != spare]
        assert dropped == bool(others)
        assert list(self.hub._suspended) == [owner for owner in before if owner not in others[:1]]

    @rule(silent_s=st.sampled_from([1.0, 10.0]))
    def stalled_ones_end(self, silent_s):
        self.hub.drop_stalled(self.now_s - silent_s)
        assert all(active.moved_s >= self.now_s - silent_s for active in self.hub._active.values())

    @rule()
    def nobody_has_come_back(self):
        self.hub.drop_expired(self.now_s)
        assert all(kept.moved_s >= self.now_s - SUSPENDED_S for kept in self.hub._suspended.values())

    @invariant()
    def where_a_transfer_is_kept_agrees_with_its_state(self):
        if not hasattr(self, "hub"):
            return
        active = [one.transfer for one in self.hub._active.values()]
        suspended = [one.transfer for one in self.hub._suspended.values()]
        assert {transfer.state for transfer in active} <= {"announced", "moving"}
        assert {transfer.state for transfer in suspended} <= {"suspended"}
        kept = {id(transfer) for transfer in active + suspended}
        over = {transfer.state for transfer in self.transfers if id(transfer) not in kept}
        assert over <= {"complete", "corrupt", "dropped"}, "one was let go of that has not ended"


class IncomingMachine(HubTransfersMachine):
    """Pushes on their way in."""

    def make(self):
        self.hub = IncomingTransfers()

    @rule(
        peer=PEERS,
        owner=OWNERS,
        payload=st.sampled_from(PAYLOADS),
        seq=st.sampled_from([1, 1, 2]),
        pieces=st.integers(0, 3),
    )
    def push_is_announced(self, peer, owner, payload, seq, pieces):
        self.cut(peer)
        self.count += 1
        checksum = wire.checksum(payload)
        push = Push(
            bytes(16), seq, VERSION, 1, 1, 0.0, 0.0, 0.1, "identity", checksum, len(payload), transfer=self.count
        )
        kept = self.hub._suspended.get(owner)
        of_this = kept is not None and (kept.push.seq, kept.push.checksum) == (seq, checksum)
        transfer = self.hub.resume(peer, owner, push, self.now_s)
        assert transfer is (kept.transfer if of_this else None)
        assert not self.hub.is_suspended(owner)
        if transfer is None:
            member = Member(*owner, 1, DeviceProfile(), DeviceMeasurements(), peer=peer)
            transfer = self.hub.receive(peer, member, push, memoryview(bytearray(len(payload))), self.now_s)
            self.transfers.append(transfer)
        assert transfer.credit().transfer == self.count
        self.payloads[peer] = payload
        for _ in range(pieces):
            if peer in self.hub._active:
                self.give_piece(peer)

    @precondition(lambda self: self.hub._active)
    @rule(data=st.data(), sound=st.sampled_from([True, True, True, False]))
    def piece_comes(self, data, sound):
        peer = data.draw(st.sampled_from(sorted(self.hub._active)))
        if sound:
            self.give_piece(peer)
        else:
            with pytest.raises(ProtocolError):
                self.give_piece(peer, wrong=1)
            assert peer not in self.hub._active

    def give_piece(self, peer, wrong=0):
        credit = self.hub._active[peer].transfer.credit()
        part = self.payloads[peer][credit.received_bytes :][:PIECE]
        piece = Piece(credit.transfer, credit.received_bytes, wire.checksum(part) ^ wrong)
        self.hub.accept(peer, piece, part, self.now_s)


def _member(peer, owner):
    return Member(owner[0], owner[1], 1, DeviceProfile(), DeviceMeasurements(), peer=peer)


class OutgoingMachine(HubTransfersMachine):
    """Assignments and graphs on their way out."""

    def make(self):
        self.hub = OutgoingTransfers(PIECE, SUSPENDED_MAX)

    @rule(
        peer=PEERS,
        owner=OWNERS,
        payload=st.sampled_from(PAYLOADS),
        graph=st.sampled_from([False, False, True]),
        moves=st.sampled_from([True, True, False]),
    )
    def payload_is_announced(self, peer, owner, payload, graph, moves):
        member = _member(peer, owner)
        checksum = wire.checksum(payload)
        message = Assignment(VERSION, 1, "identity", checksum, len(payload))
        if graph:
            message = GraphHeader("0" * 64, checksum, len(payload))
        elif (kept := self.hub.resume(member)) is not None:
            message, payload = kept
            assert message.checksum == wire.checksum(payload)
        assert graph or owner not in self.hub._suspended
        announced = self.hub.announce(member, message, payload, self.now_s)
        assert announced.transfer > self.count
        self.count = announced.transfer
        self.transfers.append(self.hub._active[peer].transfer)
        if moves:
            self.hub.credit(peer, Credit(announced.transfer, 0), self.now_s)

    @rule(peer=PEERS, owner=OWNERS, partial=st.sampled_from([None, 0, *map(wire.checksum, PAYLOADS)]))
    def device_fetches(self, peer, owner, partial):
        self.connections_are_cut()
        if partial is not None:
            self.hub.note_partial(peer, partial)
        kept = self.hub._suspended.get(owner)
        assert self.hub.can_resume(_member(peer, owner)) == (kept is not None and kept.message.checksum == partial)

    @precondition(lambda self: self.hub._active)
    @rule(data=st.data(), possible=st.sampled_from([True, True, True, False]))
    def credit_comes(self, data, possible):
        peer = data.draw(st.sampled_from(sorted(self.hub._active)))
        transfer = self.hub._active[peer].transfer
        credit = Credit(transfer.number, transfer._sent + (not possible) * 2**40)
        if possible:
            credited, _ = self.hub.credit(peer, credit, self.now_s)
            assert credited is transfer
        else:
            with pytest.raises(ProtocolError):
                self.hub.credit(peer, credit, self.now_s)
        assert (peer in self.hub._active) == (transfer.state != "complete")

    @invariant()
    def few_assignments_and_no_graph_are_kept(self):
        if hasattr(self, "hub"):
            assert len(self.hub._suspended) <= SUSPENDED_MAX
            assert all(isinstance(kept.message, Assignment) for kept in self.hub._suspended.values())
            graphs = [active for active in self.hub._active.values() if isinstance(active.message, GraphHeader)]
            assert self.hub.graphs == len(graphs)


IncomingMachine.TestCase.settings = OutgoingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40
)
TestIncoming = IncomingMachine.TestCase
TestOutgoing = OutgoingMachine.TestCase
