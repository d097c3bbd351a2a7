"""Devices that download a base: cut off, switched off, and never given a byte twice."""

import msgspec
import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.hub.settings import HubCoreSettings, Limits, Liveness
from edgeasync.errors import GraphError, StorageError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.graph import Base, ShippedBase, ShippedGraph, fingerprint_of
from edgeasync.protocol.messages import GraphHeader, Piece
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice, StoredBases
from simulation.link import LinkProfile
from tests.support.simulation.adders import Adder
from tests.support.simulation.hubs import simulated_hub

SPEC = ParameterSpec((Parameter("weights", (3,)),))
CONTENT = np.random.default_rng(0).bytes(3_000_000)
BASE = Base(fingerprint_of(CONTENT), len(CONTENT))
LINK = LinkProfile(200_000, 200_000, 0.02)
SETTINGS = HubCoreSettings(
    liveness=Liveness(heartbeat_s=0.5, lease_s=3.0), limits=Limits(piece_bytes=ByteCount(1 << 18))
)
HEADERS = 0.02
"""What headers take at most, of a base."""


class World:
    """A hub that ships a graph with a base, and devices that lack both."""

    def __init__(self, devices=1, *, content=CONTENT, link=LINK, **limits):
        self.clock = VirtualClock()
        self.graph = ShippedGraph(b"graph", ShippedBase(BASE, content))
        self.hub = simulated_hub(self.clock, SPEC, settings=SETTINGS, graph=self.graph)
        self.devices = [
            SimulatedDevice(
                self.hub, f"device-{number}", Adder(SPEC), step_s=0.1, link=link, limits=DeviceLimits(**limits)
            )
            for number in range(devices)
        ]
        for device in self.devices:
            device.start()

    @property
    def device(self):
        return self.devices[0]

    def stored(self, device=None):
        return len((device or self.device).store.bases.stored.get(BASE, b""))

    def until_stored(self, nbytes):
        assert self.clock.run(lambda: self.stored() >= nbytes, self.clock.now_s + 60.0)

    def trains(self, limit_s=120.0):
        """Let all devices train; they have the whole base, and were given each of its bytes once."""
        last = self.hub.core.updates_applied + 3 * len(self.devices)
        assert self.clock.run(lambda: self.hub.core.updates_applied >= last, self.clock.now_s + limit_s)
        for device in self.devices:
            assert device.store.bases.stored == {BASE: CONTENT}
            assert device.store.bases.received[BASE] == BASE.nbytes
        self.hub.core.check()


FAULTS = {
    "the link is cut": lambda world: world.device.break_connection(),
    "the agent is killed": lambda world: (world.device.cut_power(), world.device.start()),
    "the hub is killed": lambda world: (world.hub.crash("broken"), world.hub.start()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_download_continues_after_five_faults(fault):
    world = World()
    for number in range(1, 6):
        world.until_stored(number * BASE.nbytes // 6)
        fault(world)
    world.trains()
    assert world.device.down.bytes_sent < (1 + HEADERS) * BASE.nbytes
    assert world.stored() == BASE.nbytes


def base_events(world):
    return [tell.detail for _, tell in world.device.told if tell.event == "base"]


def test_a_device_has_its_base_after_a_restart():
    world = World()
    world.trains()
    fetched = world.device.down.bytes_sent
    world.device.cut_power()
    world.device.start()
    world.trains()
    assert world.device.down.bytes_sent - fetched < HEADERS * BASE.nbytes
    assert base_events(world) == [
        f"downloading from byte 0 of {BASE.nbytes}", f"fetched, {BASE.nbytes} bytes",
        f"from the cache, {BASE.nbytes} bytes",
    ]  # fmt: skip


def test_devices_download_at_the_same_time():
    world = World(4)
    world.trains()


class Meddling:
    """A link that loses, repeats or spoils some of the pieces that go to a device."""

    def __init__(self, device, meddle, every):
        self._deliver = device._deliver
        self._meddle = meddle
        self._every = every
        self.pieces = 0
        device._deliver = self.deliver

    def deliver(self, peer, header, payload):
        if isinstance(wire.decode(header), Piece):
            self.pieces += 1
            if not self.pieces % self._every:
                self._meddle(lambda payload: self._deliver(peer, header, payload), payload)
                return
        self._deliver(peer, header, payload)


MEDDLERS = {
    "lost": lambda deliver, payload: None,
    "corrupt": lambda deliver, payload: deliver(bytes(len(payload))),
    "cut short": lambda deliver, payload: deliver(bytes(payload)[:-1]),
    "repeated": lambda deliver, payload: (deliver(payload), deliver(payload)),
}


@pytest.mark.parametrize("meddle", MEDDLERS.values(), ids=MEDDLERS)
def test_pieces_that_are_spoilt_on_their_way_are_sent_again(meddle):
    world = World()
    meddler = Meddling(world.device, meddle, 7)
    world.trains()
    assert meddler.pieces > 14


class TroubledBases(StoredBases):
    """A disk with limited room, on which another agent may be downloading."""

    room = BASE.nbytes
    locked = False

    def find(self, base):
        return None if self.locked else super().find(base)

    def append(self, base, offset, part):
        if offset + len(part) > self.room:
            raise StorageError("the disk is full")
        super().append(base, offset, part)


def test_a_full_disk_is_reported_once_and_the_download_continues_when_there_is_room():
    world = World()
    world.device.store.bases = bases = TroubledBases()
    bases.room = 1_000_000

    def reports():
        return [tell.detail for _, tell in world.device.told if tell.event == "warning"]

    assert not world.clock.run(lambda: len(reports()) > 1, 600.0)
    assert reports() == ["the disk is full"]
    assert 10 <= world.hub.core.messages_accepted["fetchgraph"] <= 25, "one a minute, after a few soon"
    bases.room = BASE.nbytes
    world.trains()


def test_a_base_that_another_agent_downloads_is_waited_for():
    world = World()
    world.device.store.bases = bases = TroubledBases()
    bases.locked = True
    assert not world.clock.run(world.stored, 30.0)
    assert world.hub.core.messages_accepted["fetchgraph"] == 1, "the graph's; the base is not requested"
    assert base_events(world) == ["another agent on this machine downloads it"], "said once"
    bases.stored[BASE] = bytearray(CONTENT)
    bases.locked = False
    last = world.hub.core.updates_applied + 3
    assert world.clock.run(lambda: world.hub.core.updates_applied >= last, 60.0)
    assert not bases.received


# -- what a device refuses -------------------------------------------------------------------------------------


def ended(world):
    assert world.clock.run(lambda: world.device.finished is not None, 60.0)
    assert isinstance(world.device.finished.error, GraphError)
    return str(world.device.finished.error)


def test_a_forged_base_ends_the_device():
    forged = CONTENT[:-1] + b"!"
    world = World(content=forged)
    assert "do not trust this hub" in ended(world)
    assert not world.device.store.bases.stored


def test_a_base_above_the_limit_ends_the_device():
    message = ended(World(base_cache_bytes_max=ByteCount(BASE.nbytes - 1)))
    assert f"{BASE.nbytes} bytes" in message
    assert "base_cache_bytes_max" in message


def test_a_base_above_the_daily_quota_ends_the_device():
    message = ended(World(bytes_per_day_max=ByteCount(BASE.nbytes)))
    assert "bytes_per_day_max" in message


def test_another_base_than_announced_ends_the_device():
    world = World()
    deliver = world.device._deliver

    def meddle(peer, header, payload):
        message = wire.decode(header)
        if isinstance(message, GraphHeader) and message.fingerprint == BASE.fingerprint:
            header = wire.encode(msgspec.structs.replace(message, fingerprint="0" * 64))
        deliver(peer, header, payload)

    world.device._deliver = meddle
    assert "another graph than it announced" in ended(world)
