"""Fleets drawn by seed: unequal speeds and links, stragglers, and devices that come and go."""

import math
import statistics
from random import Random

import msgspec

from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile

BYTES_PER_MBIT = 125_000


class Churn(msgspec.Struct, frozen=True):
    """Mean seconds a device is on, and then off, both exponential: 9 and 1 are 10 % downtime."""

    on_s: float = 9.0
    off_s: float = 1.0


class FleetProfile(msgspec.Struct, frozen=True):
    """What a fleet is like.

    Step times are log-normal about the median `step_s`; `spread` is the 97.5 % quantile over the 2.5 % one.
    `stragglers` is the share of devices, rounded to whole ones, whose steps take `slowdown` times longer still.
    Rates are log-uniform, up and down by themselves; delays, one way, uniform.
    """

    devices: int = 20
    step_s: float = 0.01
    spread: float = 10.0
    stragglers: float = 0.1
    slowdown: float = 30.0
    mbit_per_s: tuple[float, float] = (1.0, 50.0)
    delay_s: tuple[float, float] = (0.005, 0.030)
    churn: Churn | None = Churn()


class DeviceDraw(msgspec.Struct, frozen=True):
    """One device of a fleet."""

    device_id: str
    step_s: float
    link: LinkProfile


def draw_fleet(profile: FleetProfile, seed: int) -> list[DeviceDraw]:
    """Draw the devices of a fleet; the same profile and seed give the same ones."""
    random = Random(f"{seed}/fleet")
    sigma = math.log(profile.spread) / (2.0 * statistics.NormalDist().inv_cdf(0.975))
    # Drawn apart, so that a fleet without stragglers is the same but for them.
    slow = set(Random(f"{seed}/slow").sample(range(profile.devices), round(profile.stragglers * profile.devices)))
    fleet = []
    for number in range(profile.devices):
        step_s = profile.step_s * random.lognormvariate(0.0, sigma)
        low, high = (math.log(mbit) for mbit in profile.mbit_per_s)
        up, down = (BYTES_PER_MBIT * math.exp(random.uniform(low, high)) for _ in range(2))
        link = LinkProfile(up, down, random.uniform(*profile.delay_s))
        slowdown = profile.slowdown if number in slow else 1.0
        fleet.append(DeviceDraw(f"device-{number + 1}", step_s * slowdown, link))
    return fleet


def switch_off_and_on(clock: VirtualClock, device: SimulatedDevice, churn: Churn, seed: str) -> None:
    """Cut the power of a device that is on, and give it back, again and again until its agent ends."""
    random = Random(f"{seed}/churn")

    def off() -> None:
        if device.running:
            device.cut_power()
            clock.after(random.expovariate(1.0 / churn.off_s), on)

    def on() -> None:
        device.start()
        clock.after(random.expovariate(1.0 / churn.on_s), off)

    clock.after(random.expovariate(1.0 / churn.on_s), off)
