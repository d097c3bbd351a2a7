"""Runs a seed of peers: faults first, then all is healed, one is killed, and comes back."""

from dataclasses import dataclass, field

from tests.support.simulation.harness import noting_failure
from tests.support.simulation.peer_faults import FAULTS_S, Injector, Trouble, draw_faults
from tests.support.simulation.peer_world import World

HEALED_S = 60.0
"""Virtual time in which all peers must be in one round again; who was accused may be left out for 32 leases."""

LOSSY_S = 10.0
"""Virtual time in which each peer must complete a round on links that lose messages."""

LATENCY_S = 0.05
"""What messages and the trainer's work may add, beside the rounds themselves."""


@dataclass
class PeerPlan:
    """The faults of a seed, which can be cut down."""

    faults: tuple

    def without(self, position):
        return PeerPlan(self.faults[:position] + self.faults[position + 1 :])

    def write(self):
        return "".join([f"{fault}\n" for fault in self.faults])


@dataclass
class PeerResult:
    """The result of a seed."""

    seed: int
    plan: PeerPlan
    topology: str = ""
    failure: str = ""
    trace: int = 0
    where: str = field(default="", compare=False)
    means_applied: int = 0
    rounds_given_up: int = 0
    virtual_s: float = 0.0
    longest_s: float = 0.0


def run_peers(seed, plan=None, **options):
    """Run a seed, with its own faults or others."""
    world = World(seed, **options)
    plan = PeerPlan(draw_faults(seed, world.names)) if plan is None else plan
    result = PeerResult(seed, plan, world.settings.topology)
    with noting_failure(result):
        _live_through(world, plan, result)
    result.means_applied = len(world.checks.applied)
    reports = [report.event for device in world.devices.values() for _, report in device.reports]
    result.rounds_given_up = reports.count("round_abandoned")
    result.virtual_s = world.clock.now_s
    result.trace = hash((world.events, world.clock.now_s, *[tuple(each.model) for each in world.devices.values()]))
    return result


def _live_through(world, plan, result):
    injector = Injector(world, plan.faults)
    world.start()
    world.pass_time(FAULTS_S)
    injector.heal()
    everybody = set(world.names)
    assert meet_in_a_round(world, everybody, HEALED_S), "healed peers are not all in one round"

    began_s = world.clock.now_s
    world.pass_time(2.0)
    rounds_s = round_times(world, began_s)
    assert rounds_s, "no round becomes whole"
    if len(everybody) > 2:
        _lose_one(world, everybody, max(rounds_s), result)
    trouble = Trouble(lost=0.05, repeated=0.1, late=0.1, late_s=0.05)
    world.bad = dict.fromkeys(world.latency_s, (world.clock.now_s + LOSSY_S, trouble))
    before = {name: world.completed(name) for name in everybody}
    moved = world.run(lambda: all(world.completed(name) != before[name] for name in everybody), LOSSY_S)
    assert moved, "no round becomes whole on links that lose messages"
    world.bad = {}
    assert meet_in_a_round(world, everybody, 8.0), "healed links, and no round of all"

    steps = {name: device.steps for name, device in world.devices.items()}
    world.pass_time(1.0)
    assert all(device.steps > steps[name] for name, device in world.devices.items()), "training has stopped"
    for device in world.devices.values():
        device.trains = False
    world.pass_time(0.2)
    assert meet_in_a_round(world, everybody, 5.0), "no round without training"
    models = {tuple(device.model) for device in world.devices.values()}
    assert len(models) == 1, "the models do not agree"


def _lose_one(world, everybody, round_s, result):
    """Kill a peer, or hang its trainer, and let it come back."""
    victim = world.devices[world.random.choice(world.names)]
    hangs = world.random.random() < 0.3
    world.pass_time(world.random.uniform(0.0, 0.6))
    began_s = world.clock.now_s
    settings = world.settings
    limit_s = settings.lease_s + settings.round_every_s + 2 * round_s + LATENCY_S
    if hangs:  # the others wait for it until a round stands still, then hear one another out
        limit_s += settings.round_every_s + round_s + settings.ping_s
        victim.hung_until_s = began_s + 10.0
    else:
        victim.kill()
    assert meet_in_a_round(world, everybody - {victim.name}, limit_s), "a lost peer stops the others for too long"
    result.longest_s = world.clock.now_s - began_s
    victim.hung_until_s = world.clock.now_s
    victim.start()
    assert meet_in_a_round(world, everybody, 12.0 if hangs else 4.0), "a peer that comes back is left out"


def meet_in_a_round(world, names, for_s):
    """Let time pass until these peers, and no others, have completed the same round, begun from now on."""
    began = set(world.checks.snapshots)

    def met():
        rounds = {world.completed(name) for name in names}
        if len(rounds) != 1 or None in rounds:
            return False
        (round_id,) = rounds
        return world.members(round_id) == names and not any(known == round_id for known, *_ in began)

    return world.run(met, for_s)


def round_times(world, since_s):
    """Return how long the rounds since then took, from the first snapshot to the last mean."""
    started, ended = {}, {}
    for device in world.devices.values():
        for time_s, report in device.reports:
            if time_s >= since_s and report.event == "round_started":
                started.setdefault(report.detail, time_s)
            elif report.event == "round_done" and report.detail in started:
                ended[report.detail] = time_s
    return [ended[name] - started[name] for name in ended]
