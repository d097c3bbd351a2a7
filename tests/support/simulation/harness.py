"""Runs a seed: faults first, then all is healed, and every promise must have been kept."""

import itertools
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.faults import FaultPlan, draw_faults
from simulation.injector import FaultInjector
from tests.support.simulation.world import World

FAULTS_S = 12.0
"""Virtual time in which faults happen."""

HEALED_S = 120.0
"""Virtual time in which every device must train again, and the model learn, once all is healed."""

REST_S = 30.0
"""Virtual time in which everything in flight must end."""

EVENTS_MAX = 50_000
"""Things done in a whole run; usual are about a thousand. More is spinning: time no longer passes."""

DISTANCE_MAX = 0.3
"""How near the model must come to what it is taught: the distance at first is 1."""


@dataclass
class Result:
    """The result of a seed."""

    seed: int
    plan: FaultPlan
    policy: str = ""
    failure: str = ""
    trace: str = ""
    where: str = field(default="", compare=False)
    hub_crashes: int = 0
    device_crashes: int = 0
    updates: int = 0
    virtual_s: float = 0.0


@contextmanager
def noting_failure(result):
    """Note in a seed's result what the seed has found, whatever it is."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        result.failure = f"{type(error).__name__}: {error}"
        result.where = traceback.format_exc()


def run(seed, plan=None, *, delayed=False):
    """Run a seed, with its own faults or others; with `delayed` answers are used some steps later."""
    world = World(seed, delayed=delayed)
    if plan is None:
        plan = draw_faults(seed, list(world.devices), FAULTS_S)
    result = Result(seed, plan, world.name)
    injector = FaultInjector(world.clock, plan, world.hub, world.devices, world.disk)
    with noting_failure(result):
        _live_through(world, injector)
    result.trace = world.trace.digest()
    result.hub_crashes, result.device_crashes = injector.hub_crashes, injector.device_crashes
    result.updates = world.hub.core.updates_applied if world.hub.running else 0
    result.virtual_s = world.clock.now_s
    return result


def _live_through(world, injector):
    for device in world.devices.values():
        device.start()
    events = itertools.count(1)

    def pass_time(until, limit_s):
        def look():
            assert next(events) <= EVENTS_MAX, "it spins"
            injector.look()
            return until()

        return world.clock.run(look, world.clock.now_s + limit_s)

    pass_time(lambda: False, FAULTS_S)
    injector.heal()
    devices = world.training
    for device in world.devices.values():
        device.training.trainer.diverges = 0
        if device not in devices:
            device.cut_power()
    answers = [device.answers for device in devices]

    def well():
        trained = all(device.answers >= before + 2 for device, before in zip(devices, answers, strict=True))
        return trained and world.distance() <= DISTANCE_MAX

    healed = pass_time(well, HEALED_S)
    for device, before in zip(devices, answers, strict=True):
        assert device.finished is None, f"{device.device_id} has ended: {device.finished}"
        assert device.answers >= before + 2, f"{device.device_id} does not train again"
    assert healed, f"the model does not learn: its distance is still {world.distance():.2f}"

    for device in devices:
        device.quiet = True

    def at_rest():
        return all(device.resting and device.training.work is None for device in devices)

    assert pass_time(at_rest, REST_S), "something is still in flight"
    pass_time(lambda: False, 1.0)  # and what is still on the wire
    assert pass_time(lambda: world.hub.resting, 1.0), "the hub never comes to rest"
    world.checks.at_rest()


def shrink(seed, plan, run=run):
    """Return the plan without the faults that a seed fails without; `run` runs it."""
    position = 0
    while position < len(plan.faults):
        smaller = plan.without(position)
        if run(seed, smaller).failure:
            plan, position = smaller, 0
        else:
            position += 1
    return plan
