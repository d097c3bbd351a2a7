"""A share of a link is kept by what is measured, in virtual time."""

import itertools

import numpy as np
import pytest

from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.engine.link_share import TRAIN_BYTES
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.transfers import PIECE_BYTES_MIN
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.parts.small_runs import in_full
from tests.support.simulation.adders import Adder
from tests.support.simulation.hubs import simulated_hub

LENGTH = 1 << 18
SPEC = ParameterSpec((Parameter("w", (LENGTH,)),))
STEP_S = 0.02
MBIT_20 = 20e6 / 8
WINDOW_S = 10.0
SETTLED_S = 60.0
"""A device's first model comes without a pause, and its first updates measure the link."""


class Device(SimulatedDevice):
    """A device that notes its traffic."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.passed = []

    def send(self, header, payload):
        self.passed.append((self.now_s, len(header) + len(payload or b"")))
        super().send(header, payload)

    def _deliver(self, peer, header, payload):
        self.passed.append((self.now_s, len(header) + len(payload or b"")))
        super()._deliver(peer, header, payload)


def device_on(link, steps, **limits):
    clock = VirtualClock()
    hub = simulated_hub(
        clock,
        SPEC,
        in_full(steps, delay_steps=steps),
        settings=HubCoreSettings(codec=FLOAT32),
    )
    device = Device(hub, "pi", Adder(SPEC, 0.5), step_s=STEP_S, link=link, limits=DeviceLimits(**limits))
    device.start()
    return clock, device


def rates(passed, since_s):
    """The bytes a second of every window that begins with a message."""
    times = np.array([moment_s for moment_s, _ in passed])
    total = np.array([0, *itertools.accumulate(size for _, size in passed)])
    ends = np.searchsorted(times, times + WINDOW_S)
    return [
        (total[end] - total[first]) / WINDOW_S
        for first, end in enumerate(ends)
        if since_s <= times[first] <= times[-1] - WINDOW_S
    ]


PIECES = (TRAIN_BYTES + PIECE_BYTES_MIN) / WINDOW_S
"""By so much a window may differ: a train leaves at once, and a window begins or ends within a piece."""


@pytest.mark.parametrize("delay_s", [0.002, 0.01])
@pytest.mark.parametrize("up", [MBIT_20, MBIT_20 / 4], ids=["20 Mbit/s", "5 Mbit/s up"])
def test_a_fifth_of_the_link_is_kept_and_training_does_not_wait(up, delay_s):
    share = 0.2 * up
    steps = int(2 * 4 * LENGTH / share / STEP_S)
    clock, device = device_on(LinkProfile(up, MBIT_20, delay_s), steps, link_share=0.2)
    clock.run(lambda: clock.now_s >= SETTLED_S, 1e4)
    before = device.steps_total
    clock.run(lambda: clock.now_s >= 6 * steps * STEP_S + SETTLED_S, 1e4)
    found = rates(device.passed, SETTLED_S)
    assert len(found) > 50
    away = 0.05 * share if up == MBIT_20 else PIECES
    assert share - away <= min(found)
    assert max(found) <= share + away
    assert (device.steps_total - before) * STEP_S >= (clock.now_s - SETTLED_S) / 1.05


def test_over_long_round_trips_less_than_the_share_is_used():
    clock, device = device_on(LinkProfile(MBIT_20, MBIT_20, 0.05), 209, link_share=0.2)
    clock.run(lambda: clock.now_s >= 120.0, 1e4)
    found = np.array(rates(device.passed, SETTLED_S)) / (0.2 * MBIT_20)
    assert found.min() >= 0.9
    assert found.max() <= 1.05


def test_a_link_that_becomes_slower_is_measured_again():
    clock, device = device_on(LinkProfile(MBIT_20, MBIT_20, 0.005), 200, link_share=0.2)
    clock.run(lambda: clock.now_s >= 30.0, 1e4)
    device.up.bytes_per_s = device.down.bytes_per_s = MBIT_20 / 4
    clock.run(lambda: clock.now_s >= 200.0, 1e4)
    assert max(rates(device.passed, 150.0)) <= 0.2 * MBIT_20 / 4 + PIECES


def test_a_cap_holds_beside_a_share():
    clock, device = device_on(
        LinkProfile(MBIT_20, MBIT_20, 0.005), 200, link_share=0.9, bandwidth_bytes_per_s_max=300_000
    )
    clock.run(lambda: clock.now_s >= 120.0, 1e4)
    assert max(rates(device.passed, SETTLED_S)) <= 300_000 + PIECES
