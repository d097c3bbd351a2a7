import heapq
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.policies.frequency import (
    AGREEMENT_MIN,
    STEPS_MAX,
    AdaptiveFrequency,
    Cadence,
    FixedFrequency,
    TimeFrequency,
)

CALM = FleetMeasurements()


def device(step_s=0.2, communication_s=2.0, **fields):
    return DeviceMeasurements(step_s=step_s, communication_s=communication_s, **{"updates": 1} | fields)


BOUNDS = {
    r"a single step|at least \d": "local_steps_min",
    r"at most \d+ steps": "local_steps_max",
    r"at most \d+ passes": "epochs_max",
    "on its way": "change",
    "the device allows": "device",
}
"""What keeps a device from what is aimed at, by how the reason begins."""


def asked(controller, history, **cadence):
    interval = controller.interval(history, Cadence(**cadence))
    assert interval.bound == next((bound for words, bound in BOUNDS.items() if re.match(words, interval.why)), "")
    return interval.local_steps, interval.why


# -- one device ----------------------------------------------------------------------------------------------


def adaptive(**parts):
    """The controller with round numbers, whatever its defaults are."""
    usual = {"period_steps_min": 8, "communication_share": 0.33, "communication_share_max": 0.5, "epochs_max": 4.0}
    return AdaptiveFrequency(**usual | parts)


FIXED, TIME, ADAPTIVE = FixedFrequency(local_steps=5), TimeFrequency(), adaptive()


@pytest.mark.parametrize(
    ("controller", "history", "cadence", "steps", "why"),
    [
        (FIXED, DeviceMeasurements(), {}, 5, "fixed"),
        (FIXED, device(), {"period_s": 60.0, "gain": 0.25}, 5, "fixed"),
        (FIXED, device(), {"steps_factor": 0.5}, 2, "fixed; hurried against divergence"),
        (FIXED, device(local_steps_max=3), {}, 3, "the device allows 3 steps"),
        (FIXED, device(assigned_steps=1), {}, 2, "on its way; fixed"),
        (FIXED, device(assigned_steps=13), {}, 7, "on its way; fixed"),
        (FIXED, device(assigned_steps=64, updates=0), {}, 5, "fixed"),
        (TIME, DeviceMeasurements(), {}, 8, "first measurement"),
        (TIME, device(0.25), {}, 32, "10 s as set"),
        (TIME, device(0.25, 9.9), {}, 1, "a single step; 10 s as set"),
        (TIME, device(2**-16, 0.0), {}, 655_360, "10 s as set"),
        (TIME, device(1e-9, 0.0), {}, 2**31, "at most 2147483648 steps; 10 s as set"),
        (TimeFrequency(local_steps_max=12), device(0.25), {}, 12, "at most 12 steps; 10 s as set"),
        (
            ADAPTIVE,
            device(0.25, examples=8, batch_examples=64.0),
            {"period_s": 10.0},
            2,
            "at most 4 passes over its 8 examples",
        ),
        (TIME, device(0.25, examples=64, batch_examples=0.0), {}, 32, "10 s as set"),
        (TIME, device(0.25, assigned_steps=15), {}, 30, "on its way; 10 s as set"),
        (TIME, device(0.25, assigned_steps=15, local_steps_max=20), {}, 20, "the device allows 20 steps"),
        (TIME, device(0.25), {"steps_factor": 0.5}, 16, "10 s as set; hurried against divergence"),
        (ADAPTIVE, DeviceMeasurements(), {"period_s": 6.0}, 8, "first measurement"),
        (ADAPTIVE, device(), {}, 8, "first measurement"),
        (adaptive(period_steps_min=20), DeviceMeasurements(), {}, 20, "first measurement"),
        (ADAPTIVE, device(), {"period_s": 6.0}, 20, "period 6 s"),
        (ADAPTIVE, device(), {"period_s": 6.0, "gain": 0.5, "cause": "x"}, 20, "period 6 s, shortened: x"),
        (ADAPTIVE, device(0.01), {"period_s": 6.0}, 128, "at most 128 steps; period 6 s"),
        (ADAPTIVE, device(9.0), {"period_s": 6.0}, 1, "a single step; period 6 s"),
        # 5 s of talking are half of its time at 25 steps, and 95 % of that at 28.
        (
            ADAPTIVE,
            device(0.2, 5.0),
            {"period_s": 6.0},
            28,
            "slow link: talking takes 5 s, at most 50% of its time",
        ),
        # The least holds whatever else would have fewer, but for what the device allows.
        (TimeFrequency(local_steps_min=4), device(0.25, 9.9), {}, 4, "at least 4 steps; 10 s as set"),
        (
            adaptive(local_steps_min=4),
            device(0.25, examples=8, batch_examples=64.0),
            {"period_s": 10.0},
            4,
            "at least 4 steps; at most 4 passes over its 8 examples",
        ),
        (
            TimeFrequency(local_steps_min=40),
            device(0.25, assigned_steps=8),
            {},
            40,
            "at least 40 steps; on its way; 10 s as set",
        ),
        (TimeFrequency(local_steps_min=40), device(0.25, local_steps_max=6), {}, 6, "the device allows 6 steps"),
    ],
)
def test_local_steps_by_hand(controller, history, cadence, steps, why):
    assert asked(controller, history, **cadence) == (steps, why)


times = st.just(0.0) | st.floats(1e-9, 1e9)
histories = st.builds(
    DeviceMeasurements,
    step_s=times,
    communication_s=times,
    examples=st.integers(0, 2**53),
    batch_examples=st.just(0.0) | st.floats(2**-31, 1e6),
    assigned_steps=st.integers(0, 200_000),
    local_steps_max=st.integers(0, 1000),
    updates=st.integers(0, 2),
)
controllers = (
    st.builds(FixedFrequency, local_steps=st.integers(1, 1000))
    | st.builds(
        TimeFrequency,
        seconds=st.floats(0.01, 1e4),
        local_steps_min=st.integers(1, 20),
        local_steps_max=st.none() | st.integers(20, 1000),
    )
    | st.builds(
        AdaptiveFrequency,
        period_steps_min=st.integers(1, 50),
        local_steps_min=st.integers(1, 20),
        local_steps_max=st.integers(50, 1000),
    )
)


@given(controllers, histories, st.builds(Cadence, times, st.floats(0.25, 1.0), st.sampled_from([0.5, 1.0])))
def test_whatever_was_measured_a_number_of_steps_comes_of_it(controller, history, cadence):
    local_steps, why = asked(
        controller, history, period_s=cadence.period_s, gain=cadence.gain, steps_factor=cadence.steps_factor
    )
    assert why
    assert 1 <= local_steps <= (history.local_steps_max or STEPS_MAX)
    before = history.assigned_steps if history.updates else 0
    if before:
        assert local_steps <= max(getattr(controller, "local_steps_min", 1), 2 * before)


# -- the fleet -----------------------------------------------------------------------------------------------

UNEQUAL = [device(0.1, 1.0), device(0.2, 2.0), device(0.4, 4.0), DeviceMeasurements(communication_s=99.0)]


@pytest.mark.parametrize(
    ("controller", "devices", "cadence", "period_s"),
    [
        (FixedFrequency(), [], Cadence(), 0.0),
        (FixedFrequency(), [device(0.1, 1.0, assigned_steps=n) for n in (10, 20, 60)], Cadence(), 3.0),
        (TimeFrequency(seconds=7.0), UNEQUAL, Cadence(), 7.0),
        (ADAPTIVE, [], Cadence(5.0), 5.0),
        (ADAPTIVE, [DeviceMeasurements(communication_s=9.0)], Cadence(5.0), 5.0),
        (ADAPTIVE, UNEQUAL, Cadence(), 2.0 / 0.33),
        (adaptive(communication_share=0.5), UNEQUAL, Cadence(), 4.0),
        (adaptive(period_steps_min=100), UNEQUAL, Cadence(), 22.0),
        (ADAPTIVE, [device(0.2, 0.1)], Cadence(), 1.7),
        # Who is far slower than the quickest third is not waited for; with two or three, than the quickest.
        (ADAPTIVE, [device(0.2, 0.1), device(0.2, 40.0)], Cadence(), 1.7),
        (ADAPTIVE, [device(0.2, 0.1), device(0.2, 40.0), device(0.2, 50.0)], Cadence(), 1.7),
        (ADAPTIVE, [device(0.2, 0.1), device(8.0, 0.1)], Cadence(), 1.7),
        (ADAPTIVE, [device(0.2, 0.1), device(0.2, 1.1)], Cadence(), 2.2),
        (ADAPTIVE, [device(0.2, 0.1), *[device(0.2, 40.0)] * 3], Cadence(), 40.0 / 0.33),
        (FixedFrequency(), [device(0.1, 1.0, assigned_steps=n) for n in (10, 90)], Cadence(), 2.0),
        # 2 s of talking stay; of the other 1.6 s a gain of 0.49 leaves 0.7 of it by this look.
        (
            adaptive(communication_share=0.5, communication_share_max=0.6, period_steps_min=50),
            UNEQUAL,
            Cadence(9.0, 0.49),
            9.0,
        ),
    ],
)
def test_the_period_by_hand(controller, devices, cadence, period_s):
    assert controller.retune(cadence, CALM, devices).period_s == pytest.approx(period_s, rel=1e-12)


def gains(controller, fleets):
    """Retune with one fleet after another."""
    cadence, seen = Cadence(steps_factor=0.5), []
    for fleet in fleets:
        cadence = controller.retune(cadence, fleet, UNEQUAL)
        assert cadence.steps_factor == 0.5
        assert cadence.period_s == pytest.approx(2.0 + (2.0 / 0.33 - 2.0) * cadence.gain)
        seen.append(round(cadence.gain, 3))
    return seen, cadence.cause


APART = FleetMeasurements(agreement=AGREEMENT_MIN - 0.01)
VARIED = FleetMeasurements(loss_variances=[1.0] * 48 + [4.1] * 16)
USUAL = FleetMeasurements(agreement=AGREEMENT_MIN, loss_variances=[1.0] * 48 + [4.0] * 16)
BY_DIVERGENCE, BY_VARIANCE = (
    f"updates point apart (mean cosine {AGREEMENT_MIN - 0.01:.2f})",
    "the variance of the losses is 4.1 times its median",
)
DOWN = [0.7, 0.49, 0.343, 0.25, 0.25]


@pytest.mark.parametrize(
    ("metric", "fleet", "cause"),
    [
        ("stability", APART, BY_DIVERGENCE),
        ("stability", VARIED, BY_VARIANCE),
        ("loss_variance", VARIED, BY_VARIANCE),
        ("none", APART, None),
        ("stability", USUAL, None),
        ("stability", FleetMeasurements(loss_variances=[0.0] * 48 + [1.0] * 16), None),
        (
            "stability",
            FleetMeasurements(agreement=-1.0, loss_first=10.0, losses=[2.1] * 16),
            "updates point apart (mean cosine -1.00)",
        ),
    ],
)
def test_the_gain_shrinks_to_a_quarter_while_it_is_called_for(metric, fleet, cause):
    shrunk, why = gains(adaptive(metric=metric), [fleet] * 5)
    assert (shrunk, why) == (([1.0] * 5, "") if cause is None else (DOWN, cause))


def test_what_varies_when_the_losses_are_small_shortens_nothing():
    for fleet in (APART, VARIED):
        settled = msgspec.structs.replace(fleet, loss_first=10.0, losses=[2.0] * 16)
        shrunk_and_back, _ = gains(ADAPTIVE, [APART] * 2 + [settled] * 2)
        assert shrunk_and_back == [0.7, 0.49, 0.7, 1.0]


def test_the_gain_recovers_as_fast_as_it_shrank():
    shrunk_and_back, cause = gains(ADAPTIVE, [APART] * 5 + [USUAL] * 3)
    assert shrunk_and_back == [*DOWN, 0.357, 0.51, 0.729]
    assert cause == "models drifted apart before"
    assert gains(ADAPTIVE, [APART] * 5 + [USUAL] * 4) == ([*DOWN, 0.357, 0.51, 0.729, 1.0], "")


# -- a closed loop -------------------------------------------------------------------------------------------


class Loop:
    """Devices that train and talk at speeds of their own, under a controller, in virtual time."""

    def __init__(self, controller, speeds):
        self.controller = controller
        self.speeds = [list(speed) for speed in speeds]
        self.measurements = [DeviceMeasurements() for _ in speeds]
        self.exchanges = [0] * len(speeds)
        self.cadence = Cadence()
        self.updates = 0
        self.due = []
        for number in range(len(speeds)):
            self.assign(number, 0.0)

    def assign(self, number, now_s):
        history = self.measurements[number]
        before = history.assigned_steps if history.updates else 0
        interval = self.controller.interval(history, self.cadence)
        history.assigned_steps, history.why = interval.local_steps, interval.why
        assert not before or before / 2 <= history.assigned_steps <= before * 2
        step_s, communication_s = self.speeds[number]
        cycle_s = communication_s + history.assigned_steps * step_s
        heapq.heappush(self.due, (now_s + cycle_s, number, history.assigned_steps, step_s, cycle_s))

    def run(self, exchanges):
        """Run until every device has exchanged this many times more."""
        wanted = [done + exchanges for done in self.exchanges]
        while any(done < want for done, want in zip(self.exchanges, wanted, strict=True)):
            now_s, number, local_steps, step_s, cycle_s = heapq.heappop(self.due)
            self.measurements[number].observe(
                local_steps=local_steps,
                examples=8 * local_steps,
                step_s=step_s,
                cycle_s=cycle_s,
                loss_mean=0.5,
                loss_variance=0.1,
            )
            self.exchanges[number] += 1
            self.updates += 1
            if self.updates % (len(self.speeds) // 2) == 0:
                measured = [history for history in self.measurements if history.updates]
                self.cadence = self.controller.retune(self.cadence, CALM, measured)
            self.assign(number, now_s)

    @property
    def steps(self):
        return [history.assigned_steps for history in self.measurements]

    def spread(self):
        """Longest period over shortest, of the devices that no bound keeps from the fleet's."""
        periods = [
            communication_s + history.assigned_steps * step_s
            for (step_s, communication_s), history in zip(self.speeds, self.measurements, strict=True)
            if not history.why.startswith(("slow link", "at most"))
        ]
        assert len(periods) >= 6
        return max(periods) / min(periods)


SPEEDS = [(0.02, 0.05), (0.03, 0.3), (0.05, 0.1), (0.08, 0.15), (0.12, 0.15), (0.2, 0.2), (0.3, 0.1)]
"""Seconds of a step and of talking; the median device's are 0.08 and 0.15."""


@pytest.mark.parametrize("controller", [ADAPTIVE, TimeFrequency(seconds=0.8)], ids=["adaptive", "time"])
@pytest.mark.parametrize(
    "changed",
    [
        {0: (10, 1)},
        {6: (0.1, 1)},
        {1: (10, 0.1)},
        dict.fromkeys(range(7), (0.5, 1)),
        {0: (10, 1), 6: (0.1, 1), 3: (1, 2)},
    ],
    ids=["one slower", "one faster", "another slower, its link faster", "all faster", "several"],
)
def test_unequal_devices_take_equal_periods_and_settle_within_ten_exchanges(controller, changed):
    loop = Loop(controller, SPEEDS)
    loop.run(10)
    settled = loop.steps
    assert loop.spread() <= 1.5
    for number, factors in changed.items():
        loop.speeds[number] = [value * factor for value, factor in zip(SPEEDS[number], factors, strict=True)]
    loop.run(10)
    assert loop.steps != settled
    assert loop.spread() <= 1.5
    loop.speeds = [list(speed) for speed in SPEEDS]
    loop.run(10)
    assert loop.steps == settled


def test_a_link_ten_times_slower_makes_one_device_speak_more_rarely_and_no_other():
    loop = Loop(ADAPTIVE, SPEEDS)
    loop.run(10)
    settled = loop.steps
    loop.speeds[2][1] *= 10  # as long as the fleet's whole period and more
    loop.run(10)
    step_s, communication_s = loop.speeds[2]
    assert loop.steps[2] == 23
    assert communication_s / (communication_s + loop.steps[2] * step_s) <= 0.5
    others = [number for number in range(7) if number not in (2, 3)]
    assert [loop.steps[number] for number in others] == [settled[number] for number in others]
    assert all(history.communication_share <= 0.5 + 1e-9 for history in loop.measurements)
