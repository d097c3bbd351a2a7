"""Bad links in virtual time: cuts in mid-transfer, heartbeats beside payloads, and a cap on traffic."""

import numpy as np
import pytest

from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import Assignment, Fetch, Pong, Push
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.parts.small_runs import in_full
from tests.support.simulation.adders import Adder
from tests.support.simulation.hubs import simulated_hub

MBIT_20 = LinkProfile(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.01)


class Lab:
    """A hub, and devices whose messages are looked at."""

    def __init__(self, length, *, heartbeat_s=1.0, graph=None):
        self.spec = ParameterSpec((Parameter("w", (length,)),))
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock,
            self.spec,
            in_full(1),
            settings=HubCoreSettings(
                codec=FLOAT32, liveness=Liveness(heartbeat_s=heartbeat_s, lease_s=15.0 * heartbeat_s)
            ),
            graph=graph,
        )

    def device(self, name, link, *, step_s=0.1, **options):
        return Watched(self.hub, name, Adder(self.spec, 1.0), step_s=step_s, link=link, seed=1, **options)

    def member(self, device):
        return self.hub.core.members.members[device.device_id]

    def until(self, condition, limit_s=4000.0):
        assert self.clock.run(condition, limit_s)


class Watched(SimulatedDevice):
    """A device that notes when its messages pass, their sizes, and how long its pings take."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sent, self.received, self.round_trips, self.messages = [], [], [], []

    def send(self, header, payload):
        super().send(header, payload)
        self.messages.append(wire.decode(header))
        self.sent.append((self._clock.now_s, len(header) + len(payload or b"")))

    def _deliver(self, peer, header, payload):
        def note():
            if peer != self._peer:
                return  # it was lost
            self.received.append((self._clock.now_s, len(header) + len(payload or b"")))
            message = wire.decode(header)
            if isinstance(message, Pong):
                self.round_trips.append(self._clock.now_s - message.sent_s)
            elif isinstance(message, Assignment):
                self.messages.append(message)

        super()._deliver(peer, header, payload)
        self._clock.at(self.down._free_at_s + self.down._delay_s, note)

    def of_kind(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]


def cut_five_times(lab, device, direction, nbytes):
    """Break the connection five times while the payload is on its way, at a sixth of it each."""
    begun = direction.bytes_sent
    for part in range(1, 6):
        goal = begun + part * nbytes // 6
        lab.until(lambda goal=goal: direction.bytes_sent >= goal)
        device.break_connection()


def test_a_large_model_arrives_both_ways_over_a_link_that_is_cut_five_times_each_way():
    """100 MB at 20 Mbit/s, while another device moves the model on."""
    lab = Lab(25_000_000)
    other = lab.device("other", LinkProfile(), step_s=15.0)
    device = lab.device("device", MBIT_20)
    nbytes = lab.spec.nbytes
    other.start()
    device.start()

    cut_five_times(lab, device, device.down, nbytes)
    lab.until(lambda: device.steps_total == 1)
    assert device.down.bytes_sent <= 1.1 * nbytes
    assert lab.hub.core.version > 0, "the model has moved on meanwhile"
    assigned = device.of_kind(Assignment)
    assert {message.version.number for message in assigned} == {0}, "yet it was always the same version"
    partials = [message.partial for message in device.of_kind(Fetch)]
    assert partials == [None] + 5 * [assigned[0].checksum]

    begun = device.up.bytes_sent
    cut_five_times(lab, device, device.up, nbytes)
    lab.until(lambda: lab.member(device).seq_last == 1)
    assert device.up.bytes_sent - begun <= 1.1 * nbytes
    assert len(device.of_kind(Push)) == 6
    assert lab.member(device).updates_applied == 1
    assert lab.hub.core.messages_refused == 0
    lab.until(lambda: lab.hub.engine.model.current.number == lab.hub.core.version)
    other_updates = lab.member(other).updates_applied
    np.testing.assert_array_equal(lab.hub.model[::1000], np.float32(1 + other_updates))

    assert len(device.round_trips) > 60
    assert max(device.round_trips) < 0.2
    lab.hub.core.check()


def test_a_long_round_trip_does_not_throttle_a_transfer():
    lab = Lab(5_000_000)
    device = lab.device("device", LinkProfile(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.3))
    device.start()
    lab.until(lambda: device.steps_total == 1)
    assert lab.clock.now_s < 1.35 * lab.spec.nbytes / 2.5e6 + 4


def test_heartbeats_do_not_wait_for_payloads_that_one_message_could_hold():
    """800 KB on 2 Mbit/s: each way takes more than three seconds."""
    lab = Lab(200_000)
    device = lab.device("slow", LinkProfile(up_bytes_per_s=250_000, down_bytes_per_s=250_000, delay_s=0.01))
    device.start()
    lab.until(lambda: lab.clock.now_s > 200.0)
    settled = device.round_trips[20:]
    assert len(settled) > 100
    assert max(settled) < 0.02 + 2 * (65_536 + 100) / 250_000 + 0.1


CAP_BYTES_PER_S = 1_000_000


def windows(device, width_s=10.0):
    """Yield the bytes of every window of that width that begins with a message, both directions."""
    events = sorted(device.sent + device.received)
    times = np.array([time_s for time_s, _ in events])
    total = np.concatenate([[0], np.cumsum([size for _, size in events])])
    ends = np.searchsorted(times, times + width_s, side="left")
    for first, end in enumerate(ends):
        if times[first] + width_s <= times[-1]:
            yield total[end] - total[first]


@pytest.mark.parametrize("length", [5_000_000, 10_000], ids=["in pieces", "in one"])
def test_a_cap_is_kept_and_used_up_both_ways(length):
    lab = Lab(length)
    link = LinkProfile(up_bytes_per_s=1e8, down_bytes_per_s=1e8, delay_s=0.02)
    device = lab.device(
        "capped", link, step_s=0.001, limits=DeviceLimits(bandwidth_bytes_per_s_max=CAP_BYTES_PER_S)
    )
    device.start()
    lab.until(lambda: lab.clock.now_s > 120.0)
    assert lab.member(device).updates_applied >= 2
    in_windows = list(windows(device))
    assert max(in_windows) <= 1.05 * 10 * CAP_BYTES_PER_S
    assert min(in_windows) >= 0.9 * 10 * CAP_BYTES_PER_S
    for width_s in (0.5, 1.0):
        assert max(windows(device, width_s)) <= width_s * CAP_BYTES_PER_S + 5 * 65_536, "no bursts"


def test_the_hub_knows_every_byte_and_the_link():
    lab = Lab(5_000_000)
    device = lab.device("device", MBIT_20)
    device.start()
    lab.until(lambda: lab.clock.now_s > 100.0)
    (described,) = lab.hub.core.status(lab.clock.now_s)["devices"]
    assert described["bytes_down"] == device.down.bytes_sent
    on_its_way = 300_000
    assert device.up.bytes_sent - on_its_way <= described["bytes_up"] <= device.up.bytes_sent
    assert described["bandwidth_bytes_per_s"] == pytest.approx(2.5e6, rel=0.25)
    assert 0.02 <= described["round_trip_s"] < 0.2


def test_a_graph_goes_on_where_it_was_cut():
    graph = ShippedGraph(np.random.default_rng(0).bytes(8 << 20))
    lab = Lab(1000, graph=graph)
    device = lab.device("device", MBIT_20)
    device.start()
    cut_five_times(lab, device, device.down, len(graph.payload))
    lab.until(lambda: device.steps_total > 0)
    assert device.store.graphs == {graph.fingerprint: graph.payload}
    assert device.down.bytes_sent <= 1.4 * len(graph.payload), "five windows of a quarter of a megabyte"
