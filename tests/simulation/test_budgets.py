"""Limits of a day's bytes, in virtual time: kept, spent early, and remembered."""

import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.device.data_quota import HEADERS_BYTES, RECORD_EVERY_S, RECORDS_A_DAY
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.hub import arrivals
from edgeasync.core.hub.settings import DAY_S, HubCoreSettings, Limits, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Piece
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.simulation.hubs import simulated_hub

SPEC = ParameterSpec((Parameter("w", (20_000,)),))
LIMIT = 1_500_000
LINK = LinkProfile(up_bytes_per_s=1e6, down_bytes_per_s=1e6, delay_s=0.02)
CALM = Liveness(heartbeat_s=60.0, lease_s=180.0)


class Learner:
    """A trainer whose loss falls for as long as `learns`."""

    spec = SPEC

    def __init__(self, seed):
        self.change = np.float32(1e-3 * (seed + 1))
        self.loss, self.learns = 1.0, True

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.parameters[:100] += self.change
        self.loss *= 0.98 if self.learns else 1.0
        return StepResult(0.1 + self.loss, 32)


class Lab:
    """Four devices of a hub with limits, each with a limit of its own if that is given."""

    def __init__(self, limits, own=None, own_of=range(4), **kept):
        self.clock = VirtualClock()
        self.hub = simulated_hub(self.clock, SPEC, settings=HubCoreSettings(limits=limits, liveness=CALM), seed=1)
        self.trainers = [Learner(number) for number in range(4)]
        self.devices = [
            SimulatedDevice(
                self.hub,
                f"d{n}",
                trainer,
                step_s=0.05,
                link=LINK,
                workload=SimulatedWorkload(examples=1000),
                seed=n,
                limits=DeviceLimits(bytes_per_day_max=own if n in own_of else None),
                **kept,
            )
            for n, trainer in enumerate(self.trainers)
        ]
        for device in self.devices:
            device.start()

    def until(self, now_s):
        self.clock.run(lambda: False, now_s)

    @property
    def sent(self):
        return [device.up.bytes_sent + device.down.bytes_sent for device in self.devices]

    def status(self):
        return self.hub.core.status(self.clock.now_s)


@pytest.mark.parametrize("key", ["device_bytes_per_day_max", "bytes_per_day_max"])
def test_a_days_bytes_are_spent_early_all_and_never_overdrawn(key):
    most = LIMIT if key.startswith("device") else 4 * LIMIT
    lab = Lab(Limits(**{key: ByteCount(most)}))
    lab.until(DAY_S / 4)
    early = sum(lab.sent)
    assert early > 0.5 * 4 * LIMIT
    lab.until(DAY_S - 1.0)
    first = lab.sent
    assert 0.9 * 4 * LIMIT <= sum(first) <= 4 * LIMIT
    if key.startswith("device"):
        assert max(first) <= LIMIT
    described = lab.status()
    assert all(device["rest_s"] >= 0.0 for device in described["devices"])
    assert {device["state"] for device in described["devices"]} == {"training"}, "who rests is not paused"
    lab.until(1.25 * DAY_S)
    assert sum(lab.sent) - sum(first) > 0.2 * 4 * LIMIT, "the next day has bytes of its own"


def test_bytes_are_kept_for_later_once_nothing_new_is_learnt():
    spent = []
    for learns in (True, False):
        lab = Lab(Limits(device_bytes_per_day_max=ByteCount(LIMIT)))
        for trainer in lab.trainers:
            trainer.learns, trainer.loss = learns, 1e6 if learns else 1.0
        lab.until(DAY_S / 4)
        spent.append(sum(lab.sent))
    assert spent[1] < 0.85 * spent[0]


def test_without_limits_nobody_rests():
    lab = Lab(Limits())
    lab.until(20.0)
    assert sum(lab.sent) > 4e6
    traffic = lab.status()["traffic"]
    assert traffic["bytes_up"] + traffic["bytes_down"] > 4e6
    assert (traffic["bytes_per_day_max"], traffic["day_left_bytes"]) == (None, None)


@pytest.mark.parametrize(("own", "hubs"), [(LIMIT, None), (LIMIT, 2 * LIMIT), (2 * LIMIT, LIMIT)])
def test_of_a_devices_limit_and_its_hubs_the_lower_one_counts(own, hubs):
    lab = Lab(Limits(device_bytes_per_day_max=None if hubs is None else ByteCount(hubs)), own)
    before = [0] * 4
    for day in range(1, 4):
        lab.until(day * DAY_S - 60.0)
        spent = [sent - earlier for sent, earlier in zip(lab.sent, before, strict=True)]
        assert all(0.8 * LIMIT <= nbytes <= LIMIT for nbytes in spent), spent
        lab.until(day * DAY_S)
        before = lab.sent
    lab.until(3.5 * DAY_S)
    for device in lab.status()["devices"]:
        assert device["bytes_per_day_max"] == LIMIT
        assert 0 < device["day_left_bytes"] < LIMIT


@pytest.mark.parametrize("limited", [1, 2])
def test_devices_with_limits_of_their_own_do_not_hold_up_the_others(limited):
    free, mixed = Lab(Limits()), Lab(Limits(), LIMIT, range(limited))
    for lab in (free, mixed):
        lab.until(60.0)
    updates = [[device.engine.core.work.updates_answered for device in lab.devices] for lab in (free, mixed)]
    assert min(updates[1][limited:]) > 0.5 * min(updates[0]), updates
    assert all(lab.hub.core.updates_applied > 100 for lab in (free, mixed))


def test_a_device_keeps_its_limit_though_its_hub_does_not_care(monkeypatch):
    monkeypatch.setattr(arrivals, "_own_day", lambda profile, now_s: None)
    lab = Lab(Limits(), LIMIT)
    before = [0] * 4
    for day in range(3):
        lab.until(day * DAY_S + 600.0)
        rests = [report for device in lab.devices for at_s, report in device.told if report.event == "resting"]
        assert len(rests) == 4 * (day + 1)
        assert {device["state"] for device in lab.status()["devices"]} == {"left"}
        lab.until((day + 1) * DAY_S - 1.0)
        spent = [sent - earlier for sent, earlier in zip(lab.sent, before, strict=True)]
        assert all(0.7 * LIMIT <= nbytes <= LIMIT for nbytes in spent), spent
        before = lab.sent
    assert "bytes are left, but" in rests[-1].detail


def test_a_hub_that_sends_what_the_day_does_not_bear_is_left(monkeypatch):
    """The piece that was on its way is all that a device of a careless hub is sent beyond what it asked for."""
    lab = Lab(Limits(), LIMIT)
    device = lab.devices[0]
    lab.until(2.0)
    left = device.engine.core.data_quota.left_bytes(device.now_s)
    sent = device.down.bytes_sent
    junk = wire.encode(Piece(99, 0, 0))
    peer = device._peer
    for _ in range(40):
        device._deliver(peer, junk, bytes(1 << 16))
    lab.until(600.0)
    assert left < device.down.bytes_sent - sent, "more came than was left"
    assert [report.event for _, report in device.told][-1] == "resting"
    assert device.engine.core.link == "offline"
    counted = device.engine.core.data_quota.record(device.now_s).used_bytes
    assert LIMIT - HEADERS_BYTES < counted <= LIMIT - HEADERS_BYTES + (1 << 16) + len(junk)


def test_a_restart_begins_no_new_day_and_a_crash_forgets_no_byte():
    lab = Lab(Limits(), LIMIT, keeps=True)
    for turn in range(1, 40):
        lab.until(turn * 1000.0)
        for device in lab.devices:
            used = device.engine.core.data_quota.record(device.now_s).used_bytes
            assert used <= device.store.quota.used_bytes
            device.cut_power()
            device.start()
            again = device.engine.core.data_quota.record(device.now_s)
            assert used <= again.used_bytes <= used + LIMIT / RECORDS_A_DAY
    lab.until(DAY_S - 1.0)
    assert all(0.5 * LIMIT <= nbytes <= LIMIT for nbytes in lab.sent), lab.sent
    before = lab.sent
    lab.until(2 * DAY_S + RECORD_EVERY_S * 40)
    assert all(sent > earlier for sent, earlier in zip(lab.sent, before, strict=True)), "a day ends at last"


def test_a_crash_at_any_moment_forgets_no_byte():
    lab = Lab(Limits(), LIMIT)

    def forgets():
        now_s = lab.clock.now_s
        return any(
            device.engine.core.data_quota.record(now_s).used_bytes > device.store.quota.used_bytes
            for device in lab.devices
        )

    lab.clock.run(forgets, 3600.0)
    assert not forgets(), lab.clock.now_s


def test_a_crash_while_a_device_rests_makes_its_day_an_hour_longer_at_most(monkeypatch):
    monkeypatch.setattr(arrivals, "_own_day", lambda profile, now_s: None)
    lab = Lab(Limits(), LIMIT)
    lab.until(20 * 3600.0)
    device = lab.devices[0]
    assert device.engine.core.link == "offline"
    device.cut_power()
    device.start()
    assert device.engine.core.data_quota.record(device.now_s).remaining_s <= 4 * 3600.0 + RECORD_EVERY_S


def test_a_limit_that_no_day_can_keep_is_told():
    lab = Lab(Limits(), 150_000)
    lab.until(60.0)
    (told,) = [report.detail for _, report in lab.devices[0].told if report.event == "resting"]
    assert "raise [limits] bytes_per_day_max" in told
