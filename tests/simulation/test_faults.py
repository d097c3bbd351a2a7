"""Every update that was acknowledged counts exactly once, whatever dies when: by seed, and by script."""

from types import SimpleNamespace

import msgspec
import pytest

from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from simulation.faults import (
    At,
    BadLink,
    BreakConnection,
    CrashHub,
    CrashHubAtDisk,
    CutPower,
    FailingDisk,
    FaultPlan,
    FullDisk,
    HangTrainer,
    JumpClock,
    Partition,
    QuarantineDevice,
    ReadOnlyDisk,
    RestoreBackup,
    SlowDisk,
    Suspend,
    WhenSteps,
    WhenVersion,
    draw_faults,
)
from simulation.injector import FaultInjector
from simulation.link_faults import LinkFaults
from tests.support.simulation.harness import FAULTS_S, run, shrink
from tests.support.simulation.mutants import MUTANTS
from tests.support.simulation.world import EXACT, POLICIES, World
from tests.support.size import repetitions

BATCH = 20

NAMES = ["device-1", "device-2"]


def assert_well(result):
    assert not result.failure, f"seed {result.seed}\n{result.plan.write()}{result.where}"


@pytest.mark.parametrize("batch", range(repetitions("seeds of faults") // BATCH))
def test_whatever_dies_every_update_counts_once(batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        result = run(seed)
        assert_well(result)
        assert result.updates > 0
        assert result.hub_crashes > 0
        assert result.device_crashes > 0


@pytest.mark.parametrize("batch", range(repetitions("seeds of faults") // BATCH))
def test_so_it_is_when_answers_are_used_some_steps_later(batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH, 2):
        assert_well(run(seed, delayed=True))


def test_the_same_seed_gives_the_same_run_to_the_bit():
    for seed in range(repetitions("seeds that are run twice")):
        first, second = run(seed), run(seed)
        assert first == second
        assert len(first.trace) == 32
    assert run(1).trace != run(2).trace


def test_a_run_without_faults_is_well():
    for seed in range(10):
        result = run(seed, FaultPlan())
        assert_well(result)
        assert result.device_crashes == result.hub_crashes == 0


# -- the test of the test --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MUTANTS.changes)
def test_a_planted_bug_is_noticed(name):
    assert MUTANTS.is_noticed(name, run)


def test_the_known_seed_of_every_planted_bug_is_written_down():
    assert MUTANTS.seeds().keys() == MUTANTS.changes.keys()
    assert max(MUTANTS.seeds().values()) < MUTANTS.seeds_max


def test_what_was_planted_is_gone_again():
    with MUTANTS.planted("an answer leaves before the sync"):
        assert run(0).failure
    assert_well(run(0))


def test_a_failing_plan_is_cut_down_to_what_breaks():
    needed = At(3.0, CutPower("device-1"))
    other = WhenSteps("device-2", 5, HangTrainer("device-2", 1.0))
    plan = FaultPlan((other, At(1.0, Partition("device-1", 1.0)), needed, other))
    for wanted in ({needed}, {needed, other}):
        smaller = shrink(0, plan, lambda _, plan: SimpleNamespace(failure=wanted <= {*plan.faults}))  # noqa: B023
        assert {*smaller.faults} == wanted
    with MUTANTS.planted("a duplicate is applied again"):
        found = next(result for result in map(run, range(100)) if result.failure)
        smaller = shrink(found.seed, found.plan)
        assert run(found.seed, smaller).failure
        assert len(smaller.faults) < len(found.plan.faults) or len(smaller.faults) <= 2


# -- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written():
    for seed in range(200):
        plan = draw_faults(seed, NAMES, FAULTS_S)
        assert FaultPlan.read(plan.write()) == plan
        assert draw_faults(seed, NAMES, FAULTS_S) == plan
    text = f"# a remark\n\n{FaultPlan((At(1.5, CutPower('a', None)),)).write()}"
    assert FaultPlan.read(text) == FaultPlan((At(1.5, CutPower("a", None)),))
    with pytest.raises(ValueError, match="fault"):
        FaultPlan.read('{"when":"at","time_s":1.0,"fault":{"fault":"an earthquake"}}')


def test_plans_have_every_kind_of_fault():
    kinds = set()
    for seed in range(300):
        faults = [planned.fault for planned in draw_faults(seed, NAMES, FAULTS_S).faults]
        kinds |= {fault.__struct_config__.tag for fault in faults}
        alone = [planned.fault for planned in draw_faults(seed, NAMES, FAULTS_S, hub=False).faults]
        assert all(hasattr(fault, "device") for fault in alone)
    assert len(kinds) == 15


# -- by script -------------------------------------------------------------------------------------------------


class Script:
    """A world without chance: a few devices and a plan. With `forgets` the hub has no place for one of them."""

    def __init__(self, *faults, forgets=False):
        worlds = ((seed, World(seed, journal=False)) for seed in range(1000))
        seed = next(
            seed for seed, world in worlds if world.name == "exact" and world.is_plain and world.forgets == forgets
        )
        self.world = World(seed)
        self.clock = self.world.clock
        self.device = self.world.devices["device-1"]
        self.injector = FaultInjector(
            self.clock, FaultPlan(tuple(faults)), self.world.hub, self.world.devices, self.world.disk
        )
        for device in self.world.devices.values():
            device.start()

    def until(self, condition, limit_s=60.0):
        def look():
            self.injector.look()
            return condition()

        return self.clock.run(look, self.clock.now_s + limit_s)

    def until_s(self, time_s):
        self.until(lambda: False, time_s - self.clock.now_s)

    def happened(self):
        return [time_s for time_s, _ in self.injector.log]


def test_a_device_dies_at_a_step():
    script = Script(WhenSteps("device-1", 40, CutPower("device-1", 2.0)))
    assert script.until(lambda: not script.device.running)
    (died_s,) = script.happened()
    assert script.clock.now_s == died_s
    assert script.until(lambda: script.device.running)
    assert script.clock.now_s == died_s + 2.0
    assert script.device.starts == 2
    assert script.injector.device_crashes == 1


def test_a_device_that_dies_for_good_is_there_again_when_all_is_healed():
    script = Script(WhenVersion(3, CutPower("device-1", None)), At(100.0, CutPower("device-1", None)))
    assert script.until(lambda: not script.device.running)
    assert script.world.hub.version >= 3
    script.until_s(20.0)
    assert not script.device.running
    script.injector.heal()
    assert script.device.running
    script.until_s(110.0)
    assert script.device.starts == 2, "what has not happened by then does not happen"


def test_a_partition_lets_nothing_through_and_ends():
    script = Script(At(2.0, Partition("device-1", 5.0)))
    script.until_s(2.1)
    heard_s = script.device.engine.core._heard_s
    script.until_s(6.9)
    assert script.device.engine.core._heard_s <= heard_s + 0.1
    assert script.until(lambda: script.device.engine.core._heard_s > 7.0, 10.0)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_partition_may_be_one_way(way):
    script = Script(At(2.0, Partition("device-1", 5.0, way)))
    script.until_s(2.5)
    silent, other = ("up", "down") if way == "up" else ("down", "up")
    assert getattr(script.device, silent).trouble.lost == 1.0
    assert getattr(script.device, other).trouble is None
    script.until_s(7.1)
    assert getattr(script.device, silent).trouble is None


def test_what_a_partition_holds_comes_in_the_end():
    script = Script(At(2.0, Partition("device-1", 0.9, "up", held=True)))
    accepted = script.world.hub.core.messages_accepted
    script.until_s(2.8)
    before = accepted["ping"]
    script.until_s(2.95)
    assert accepted["ping"] > before


def test_faults_of_a_link_that_overlap_end_one_by_one():
    bad = LinkFaults(lost=0.1, late=0.5, late_s=0.2)
    script = Script(At(1.0, Partition("device-1", 2.0, "up")), At(2.0, BadLink("device-1", 3.0, bad)))
    script.until_s(2.5)
    assert script.device.up.trouble == bad.beside(LinkFaults(lost=1.0))
    assert script.device.down.trouble == bad
    script.until_s(3.5)
    assert script.device.up.trouble == bad
    script.until_s(5.5)
    assert script.device.up.trouble is script.device.down.trouble is None


def test_a_hung_trainer_takes_no_step_and_goes_on():
    script = Script(At(2.0, HangTrainer("device-1", 3.0)))
    script.until_s(2.01)
    steps = script.device.steps_total
    script.until_s(4.99)
    assert script.device.steps_total == steps
    assert script.device.engine.core.link == "joined", "it is alive"
    script.until_s(8.0)
    assert script.device.steps_total > steps + 5


def test_a_clock_that_jumps_shows_a_later_time():
    script = Script(At(2.0, JumpClock("device-1", 30.0)))
    script.until_s(3.0)
    assert script.device.now_s == pytest.approx(33.0)
    script.until_s(20.0)
    assert script.device.engine.core.link == "joined"
    assert script.device.answers > 3


@pytest.mark.parametrize("stands", [True, False])
def test_a_suspended_device_does_nothing_until_it_goes_on(stands):
    script = Script(At(2.0, Suspend("device-1", 4.0, clock_stands=stands)))
    script.until_s(2.0)
    sent = script.device.up.bytes_sent
    script.until_s(5.9)
    assert script.device.up.bytes_sent == sent
    answers = script.device.answers
    script.until_s(12.0)
    assert script.device.answers > answers
    assert script.device.now_s == pytest.approx(8.0 if stands else 12.0)


def test_a_hubs_time_never_goes_back_not_even_by_a_rounding():
    script = Script(*[At(4.123 * number, CrashHub(False, 3.3, "kept")) for number in range(1, 10)])
    script.until_s(42.0)  # the checks look at every time that a core is given
    assert script.world.hub.starts == 10


def test_a_clock_that_stands_still_does_so_whatever_happens_to_its_device():
    stops = [At(1.9 * number, Suspend("device-1", 0.7, clock_stands=True)) for number in range(1, 20)]
    breaks = [At(1.9 * number + 0.5, BreakConnection("device-1")) for number in range(1, 20)]
    script = Script(*stops, *breaks, At(8.0, JumpClock("device-1", 1.0)))
    script.until_s(40.0)
    assert script.device.now_s == pytest.approx(40.0 + 1.0 - 19 * 0.7)


def test_a_broken_connection_is_made_again():
    script = Script(At(2.0, BreakConnection("device-1")))
    script.until_s(6.0)
    assert "disconnected" in [report.event for _, report in script.device.told]
    assert script.device.engine.core.link == "joined"


@pytest.mark.parametrize("late_s", [0.2, 0.3])
def test_greetings_that_come_twice_do_not_go_on_without_end(late_s):
    """Each gets a session and ends the one before: a late one makes the hub refuse what the device says."""
    twice = LinkFaults(repeated=1.0, late=1.0, late_s=late_s)
    script = Script(At(3.0, BadLink("device-1", 2.0, twice, "up")), At(3.01, BreakConnection("device-1")))
    script.until_s(8.0)
    answers = script.device.answers
    script.until_s(12.0)
    assert script.device.answers > answers


# -- the hub, by script ----------------------------------------------------------------------------------------


def answered(script):
    return sum(device.answers for device in script.world.devices.values())


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("connections", ["silent", "broken", "kept"])
def test_a_hub_dies_and_goes_on(connections, power_cut):
    script = Script(At(3.0, CrashHub(power_cut, 0.5, connections)))
    hub = script.world.hub
    script.until_s(2.9)
    told = len(script.device.told)
    before = answered(script)
    assert script.until(lambda: not hub.running)
    assert script.until(lambda: hub.running)
    assert script.clock.now_s == 3.5
    assert hub.version >= before
    heard = [report.event for _, report in script.device.told[told:]]
    assert ("disconnected" in heard) == (connections == "broken")
    script.until_s(12.0)
    heard = [report.event for _, report in script.device.told[told:]]
    assert ("disconnected" in heard) == (connections != "kept")
    assert all(device.answers > 5 for device in script.world.devices.values())


@pytest.mark.parametrize("of", ["all", "names", "content"])
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_hub_dies_at_its_disk(power_cut, of):
    again = CrashHubAtDisk(2, of, off_s=0.5)
    script = Script(At(3.0, CrashHubAtDisk(7, of, power_cut, 0.5, "broken", again)))
    hub = script.world.hub
    script.until_s(3.0)
    done = script.world.disk.count(of)
    assert script.until(lambda: not hub.running)
    assert done + 7 <= script.world.disk.count(of)
    died_s = script.clock.now_s
    assert script.until(lambda: hub.running)
    assert script.clock.now_s >= died_s + 0.5
    before = answered(script)
    script.until_s(15.0)
    assert script.injector.hub_crashes == 2
    assert answered(script) > before + 5


@pytest.mark.parametrize("fault", [FullDisk(0, 3.0), ReadOnlyDisk(3.0), FailingDisk(writes=10**6)])
def test_no_update_is_answered_while_the_disk_takes_nothing(fault):
    script = Script(At(3.0, fault))
    script.until_s(3.2)
    before, acknowledged = answered(script), len(script.world.checks.memory.acknowledged)
    script.until_s(5.9)
    assert answered(script) == before
    assert len(script.world.checks.memory.acknowledged) == acknowledged
    assert script.world.hub.log.failing
    if isinstance(fault, FailingDisk):
        script.injector.heal()
    script.until_s(10.0)
    assert not script.world.hub.log.failing
    assert answered(script) > before + 5


def test_a_slow_disk_holds_answers_up():
    script = Script(At(3.0, SlowDisk(0.7, 4.0)))
    script.until_s(3.5)
    assert script.world.hub.writing.sync_s == 0.7
    before = answered(script)
    script.until_s(3.7)
    assert answered(script) == before
    script.until_s(9.0)
    assert script.world.hub.writing.sync_s == script.injector._sync_s < 0.7
    assert answered(script) > before + 5


def test_a_refused_repetition_of_a_push_leaves_the_answer_to_it_as_it_is():
    script = Script(At(3.0, SlowDisk(0.7, 4.0)))
    hub, device, pushes = script.world.hub, script.device, []
    send = device.up.send_message

    def noting(header, payload, arrive):
        if isinstance(message := wire.decode(header), Push):
            pushes.append((message, payload))
        send(header, payload, arrive)

    device.up.send_message = noting
    script.until_s(3.1)
    decided = hub.core.members.members["device-1"]
    before = decided.seq_last
    assert script.until(lambda: decided.seq_last > before and not hub.log._waiting), "its write is in progress"
    push, payload = pushes[-1]
    assert push.seq == decided.seq_last
    assert ("device-1", push.seq) not in script.world.checks.memory.acknowledged
    entry = hub.log.last
    hub.receive(device._peer, wire.encode(msgspec.structs.replace(push, session=bytes(16))), payload)
    assert (hub.log.last, hub.core.messages_refused, hub.core.duplicates) == (entry + 1, 1, 0)
    assert script.until(lambda: ("device-1", push.seq) in script.world.checks.memory.acknowledged)
    assert hub.log.durable >= entry


@pytest.mark.parametrize("empty", [False, True])
def test_a_backup_put_back_loses_what_came_after_it_and_nothing_else(empty):
    script = Script(At(3.0, RestoreBackup(3.0, 0.5, "broken", empty)))
    hub = script.world.hub
    script.until_s(3.0)
    version = hub.version
    script.until_s(5.99)
    assert hub.version > version
    assert script.until(lambda: hub.running and script.clock.now_s > 6.0)
    assert hub.version == (0 if empty else version)
    before = answered(script)
    script.until_s(15.0)
    assert answered(script) > before + 5
    for device in script.world.devices.values():
        member = hub.core.members.members[device.device_id]
        assert 0 <= member.seq_last - device.engine.core.work.pending.seq_last <= 1


# -- an operator, by script ------------------------------------------------------------------------------------


def counted(script):
    return script.world.hub.core.members.members["device-1"].updates_applied


def reported(script):
    return [report.event for _, report in script.world.hub.reports if report.event in ("excluded", "released")]


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [At(3.001, CrashHub(power_cut=True, off_s=0.3))],  # before it is on the disk
        [At(3.2, CrashHub(off_s=0.5)), At(5.0, CutPower("device-1", 0.5))],
        [At(2.5, CrashHub(off_s=1.0)), At(7.9, CrashHub(power_cut=True, off_s=1.0))],  # while the orders are given
        [At(2.9, FullDisk(0, 1.0)), At(3.2, BreakConnection("device-1"))],
    ],
    ids=["no fault", "at once", "both", "gone", "full disk"],
)
def test_a_device_is_excluded_and_released_whatever_dies(faults):
    script = Script(At(3.0, QuarantineDevice("device-1", 5.0)), *faults)
    script.until_s(5.5)
    before, answers = counted(script), script.device.answers
    assert "device-1" in script.world.hub.core.policy_engine.state.divergence.orders
    script.until_s(7.85)
    assert counted(script) == before
    assert script.device.answers > answers, "it trains on"
    script.until_s(15.0)
    assert counted(script) > before + 3
    assert reported(script) == ["excluded", "released"]


def test_who_is_still_excluded_is_released_when_all_is_healed():
    script = Script(At(3.0, QuarantineDevice("device-1", 500.0)))
    script.until_s(6.0)
    before = counted(script)
    script.injector.heal()
    script.until_s(10.0)
    assert counted(script) > before
    assert reported(script) == ["excluded", "released"]


def test_to_exclude_whom_the_hub_has_not_met_changes_nothing():
    script = Script(At(3.0, QuarantineDevice("device-99", 1.0)))
    script.until_s(6.0)
    assert reported(script) == []
    assert not script.world.hub.core.policy_engine.state.divergence.orders


def dropped(device):
    return [report.detail for _, report in device.told if "no longer knows whether push" in report.detail]


def test_a_kept_update_is_given_up_at_a_hub_that_has_its_number_from_the_device_alone():
    script = Script(
        At(3.2, RestoreBackup(0.0, 0.0, "broken", empty=True)), At(3.6, CutPower("device-1", off_s=0.2))
    )
    script.until_s(3.7)
    assert script.world.hub.core.members.members["device-1"].outcome_last is None
    assert not dropped(script.device)
    script.until_s(8.0)
    assert len(dropped(script.device)) == 1
    answers = script.device.answers
    script.until_s(12.0)
    assert script.device.answers > answers


def test_an_update_does_not_count_twice_at_a_hub_that_forgot_a_device_while_it_slept():
    """By its own clock, which stood still, the device was away for a second; another has taken its place since."""
    others = ["device-3", "device-4", "device-5"]
    script = Script(
        At(3.0, Partition("device-2", 0.8, "down")),  # the answer is lost
        At(3.79, Suspend("device-2", 10.0, clock_stands=True)),
        *[At(11.0, CutPower(name, None)) for name in others],  # there is a place for it again
        At(13.81, BreakConnection("device-2")),
        forgets=True,
    )
    device, members = script.world.devices["device-2"], script.world.hub.core.members.members
    script.until_s(3.79)
    push = device.engine.core.work.pending.push
    assert members["device-2"].checksum_last == push.checksum
    script.until_s(13.8)
    assert "device-2" not in members
    script.until_s(20.0)
    assert len(dropped(device)) == 1
    assert members["device-2"].updates_applied > 3


def test_after_two_backups_an_update_does_not_get_the_answer_of_another_with_its_number():
    script = Script(
        At(3.4, RestoreBackup(3.6, 0.0, "broken")),
        At(4.2, RestoreBackup(3.5, 0.0, "broken")),
        At(6.0, CrashHub(off_s=None)),
        At(6.0, SlowDisk(0.3, 3.0)),  # no answer before the second backup is put back
    )
    script.until_s(7.0)
    assert script.until(lambda: script.device.engine.core.link == "joined", 0.7)
    push = script.device.engine.core.work.pending.push
    assert not dropped(script.device)
    script.until_s(8.5)
    member = script.world.hub.core.members.members["device-1"]
    assert member.seq_last == push.seq
    assert member.checksum_last != push.checksum
    assert len(dropped(script.device)) == 1
    script.until_s(12.0)
    assert ("device-1", script.device.training.trainer.updates - 1) in script.world.checks.memory.told


def test_every_policy_is_drawn():
    names = [World(seed, journal=False).name for seed in range(300)]
    assert set(names) == set(POLICIES)
    assert names.count("exact") > 120
    assert POLICIES["exact"][0] is EXACT
