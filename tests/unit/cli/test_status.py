"""What `edgeasync status` tells people, on a terminal of 100 columns."""

import io
from typing import get_args

import msgspec
import pytest
from rich.console import Console

from edgeasync.cli.device_table import SORT_KEYS
from edgeasync.cli.output import Printer
from edgeasync.cli.status import (
    BOUNDS,
    STATES,
    View,
    describe_status,
    print_status,
    print_whole,
    view_of,
)
from edgeasync.core.hub.events import HubReceived
from edgeasync.core.hub.fleet_words import REMEDIES
from edgeasync.core.hub.member import DeviceState
from edgeasync.errors import ConfigError
from edgeasync.policies.frequency import Bound, Cadence
from edgeasync.policies.monitor import Monitor, NotFiniteDetector, UpdateNormDetector
from edgeasync.protocol.messages import Hello
from edgeasync.protocol.status import EndedAlarm, EvaluationStatus, RecentEvent, read_status
from tests.support.parts.statuses import alarm, device, empty_core, plain, status

CAUSE = "updates point apart (mean cosine 0.05)"
LONG = {
    "state": "training", "staleness": 123, "local_steps": 128, "last_seen_s": 12.34, "examples_per_s": 123456.7,
    "updates_applied": 1234567, "loss": 1234.5678, "assigned_steps": 100000, "talk_share": 0.333,
    "why": f"on its way; at most 100000 steps; period 12.3 s, shortened: {CAUSE}; hurried against divergence",
    "period_s": 12.3456, "push_codec": "top_k(0.1)+int8", "bytes_up": 123_400_000_000, "bytes_down": 400_000_000,
}  # fmt: skip


def shown(told, width=100, view=None, height=60, events=()):
    console = Console(width=width, file=io.StringIO())
    console.print(describe_status(told, view or View(), console, height, events))
    return console.file.getvalue()


def joined(text):
    """The text without its line breaks and padding."""
    return " ".join(text.split())


def test_a_hub_that_nobody_has_spoken_to():
    lines = shown(status(version=7)).splitlines()
    assert lines[0].endswith("version 7")
    assert lines[2] == "fleet: no period yet"
    assert lines[3:] == ["devices: none"]


def test_a_small_fleet_is_shown_whole():
    lines = shown(status([device(f"pi-{number}") for number in range(3)]), width=80).splitlines()
    assert lines[3] == "devices: 3 training"
    assert [line.split()[0] for line in lines[5:]] == ["device", "pi-0", "pi-1", "pi-2"]
    assert max(map(len, lines)) <= 80


def fleet(count):
    """A fleet in which every tenth device is lost; one key of it never came."""
    devices = [device(f"pi-{number}", loss=float(number)) for number in range(count)]
    devices[::10] = [
        device(one.id, state="lost", last_seen_s=60.0 + place) for place, one in enumerate(devices[::10])
    ]
    return status(devices, enrolled_unseen=["shed"])


@pytest.mark.parametrize("count", [30, 3000])
def test_a_large_fleet_fits_the_terminal(count):
    text = shown(fleet(count), height=24)
    lines = text.splitlines()
    assert len(lines) <= 24 + 2
    lost = count // 10
    assert lines[3] == f"devices: {count - lost} training, {lost} lost, 1 never came"
    assert lines[5] == f"needs attention: {lost + 1}"
    assert lines[6].split()[:2] == [f"pi-{count - 10}", "lost,"], "the one that has been lost for longest"
    assert "more; --all shows all" in text
    whole = shown(fleet(count), view=View(whole=True), height=24)
    assert "more" not in whole
    assert len(whole.splitlines()) == 4 + 2 + lost + 1 + 2 + count
    assert "shed" in whole


def table(text):
    """The names in the table of devices."""
    lines = text.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("device "))
    return [line.split()[0] for line in lines[begin + 1 :] if not line.startswith("and ")]


def test_devices_that_need_attention_come_first_in_the_table_unless_it_is_sorted():
    told = fleet(30)
    assert table(shown(told))[:4] == ["pi-20", "pi-10", "pi-0", "pi-1"]
    assert table(shown(told, view=View(sort="loss")))[:2] == ["pi-29", "pi-28"]
    assert table(shown(told, view=View(state="lost", sort="name"))) == ["pi-0", "pi-10", "pi-20"]
    assert "needs attention" not in shown(told, view=View(state="lost"))


@pytest.mark.parametrize(
    ("key", "worst"),
    [("seen", {"last_seen_s": 9.0}), ("updates", {"updates_applied": 1}), ("stale", {"staleness": 9}),
     ("speed", {"examples_per_s": 99.0}), ("loss", {"loss": None}), ("period", {"period_s": 9.0}),
     ("talk", {"talk_share": 0.4}), ("traffic", {"bytes_up": 9000}), ("state", {"state": "left"}),
     ("name", {})],
)  # fmt: skip
def test_each_key_sorts_the_worst_first(key, worst):
    devices = [device("b"), device("c"), device("a", **worst)]
    assert key in SORT_KEYS
    assert table(shown(status(devices), view=View(sort=key)))[0] == "a"


def test_flags_that_are_wrong_are_answered():
    assert view_of("pi", "lost", "loss", whole=True, json=False) == View("loss", "lost", "pi", whole=True)
    assert set(STATES) == set(get_args(DeviceState))
    for mistake, words in (
        (("pi", None, None, True), "--json prints the whole status"),
        ((None, "gone", None, False), "--state 'gone' is not known; choose from training"),
        ((None, None, "size", False), "--sort 'size' is not known"),
    ):
        name, state, sort, json = mistake
        with pytest.raises(ConfigError, match=words):
            view_of(name, state, sort, whole=False, json=json)


def test_one_device_with_all_that_is_known_of_it():
    slow = device("pi-9", examples_per_s=2.0, why="at least 4 steps", updates_rejected={"stale": 9})
    slow = msgspec.structs.replace(slow, last_error="update rejected: stale", last_error_s=5.0)
    past = EndedAlarm("pi-9", "its updates are not finite", 30.0, 12.0)
    told = status([*fleet(5).devices, slow], alarms_past=[past], enrolled_unseen=["shed"])
    events = [
        RecentEvent(number=number, event=name, time=0.0, device=one, detail=f"the {number}th")
        for number, (name, one) in enumerate([("joined", "pi-9")] * 11 + [("lost", "pi-9"), ("joined", "pi-0")])
    ]
    text = joined(shown(told, view=View(device="pi-9"), events=events))
    assert text.count(" joined 1970") == 9, "of the ten latest events of the device"
    assert text.rstrip().endswith("lost 1970-01-01T00:00:00+00:00 the 11th")
    for words in (
        "device pi-9", "9 of 19 updates rejected: 9 stale; slow: 2 examples/s, the median is 50 times that",
        "state training", "machine aarch64, edgeasync 0.1.0", "next update 8 steps: at least 4 steps",
        "joined 60 min ago", "address 10.0.0.7", "clock as the hub's",
        "last error 5 s ago: update rejected: stale",
        "past alarm 30.00 s ago, for 12.00 s: its updates are not finite", "temperature 50 C",
    ):  # fmt: skip
        assert words in text
    gone = device("pi-9", state="left", why_left="its agent was stopped", joined_s=None, clock_offset_s=-7200.0)
    text = joined(shown(status([gone]), view=View(device="pi-9")))
    assert "left its agent was stopped" in text
    assert "clock 2 h behind the hub's" in text
    assert "has not connected in this run" in joined(shown(told, view=View(device="shed")))
    with pytest.raises(ConfigError, match="--device pi-8: the hub knows no such device; did you mean pi-"):
        shown(told, view=View(device="pi-8"))


CELLS = ("1234567", "123457", "1.23e+03", "12.35 s", "33%", "124 GB, 123 kB left today")


def long_fleet():
    """The status of devices with long names, some of which say why they are slow."""
    slow = {"pace_percent": 50, "pace_reason": "on battery, 76 C", "day_left_bytes": 123456}
    return status([device(f"greenhouse-{number:020}", **LONG | slow) for number in range(3)])


@pytest.mark.parametrize("width", [40, 80])
def test_names_and_numbers_are_whole_where_they_do_not_fit(width):
    """A terminal wraps what is too long for it; a name or a number that is cut is a wrong one."""
    told = long_fleet()
    console = Console(width=width, file=io.StringIO())
    print_whole(describe_status(told, View(), console, 100), console)
    text = console.file.getvalue()
    assert "…" not in text
    for word in (*CELLS, *(one.id for one in told.devices)):
        assert word in text


def test_what_goes_into_a_pipe_has_a_line_for_each_device(capsys):
    core = empty_core()
    names = [f"greenhouse-{number:020}" for number in range(3)]
    for name in names:
        core.handle(HubReceived(name.encode(), Hello(name, b"s" * 16, 1)), 0.0)
        core.members.members[name].pace_percent, core.members.members[name].pace_reason = 50, "on battery, 76 C"
    print_status(plain(core), "tcp://127.0.0.1:5555", Printer(json=False))
    lines = capsys.readouterr().out.splitlines()
    for name in names:
        line, row = (line for line in lines if line.startswith(name))
        assert line.rstrip().endswith("trains at 50 % of the time: on battery, 76 C")
        assert "joining at 50 %, on battery, 76 C" in row


@pytest.mark.parametrize(
    ("bytes_up", "bytes_down", "words"),
    [(0, 0, "0 B"), (700, 299, "999 B"), (500, 500, "1 kB"), (999_499, 1, "1 MB"), (10**9, 10**8, "1.1 GB")],
)
def test_traffic_is_told_so_that_people_can_read_it(bytes_up, bytes_down, words):
    *_, heading, row = shown(status([device("shed", bytes_up=bytes_up, bytes_down=bytes_down)])).splitlines()
    assert heading.split()[-1] == "traffic"
    assert row.rstrip().endswith(f" {words}")


def at_pace(core, name, period_s, bound=""):
    """Let a device be there that exchanges so often, as its history has it."""
    core.handle(HubReceived(name.encode(), Hello(name, name.encode() * 16, 1)), 0.0)
    history = core.members.members[name].measurements
    history.step_s, history.communication_s, history.assigned_steps, history.bound = (
        0.01,
        period_s - 0.1,
        10,
        bound,
    )


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"state": "paused", "pace_percent": 0, "pace_reason": "81 C"}, "paused: 81 C"),
        ({"pace_percent": 50, "pace_reason": "76 C"}, "training at 50 %, 76 C"),
        ({"pace_percent": 40}, "training at 40 %"),
        ({"state": "paused"}, "paused "),
    ],
)
def test_why_a_device_does_not_train_at_full_pace(told, words):
    assert words in shown(status([device("pi", **told)]))


def test_the_tempo_of_the_fleet():
    core = empty_core()
    core.policy_engine.state.cadence = Cadence(period_s=0.52, gain=0.7, cause=CAUSE)
    at_pace(core, "a", 0.52)
    core.policy_engine.state.evaluations.learning_rate_factor = 0.5
    text = joined(shown(read_status(plain(core))))
    assert f"fleet: period 520 ms, shortened to 70%: {CAUSE}" in text
    assert "the hub's learning rate is reduced to 0.5 of its setting" in text
    assert "warming up" not in text


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        (["", "", ""], ""),
        (["epochs_max", "", ""], ""),
        (["epochs_max", "epochs_max", ""], "epochs_max"),
        (["epochs_max", "local_steps_max", "local_steps_max"], "local_steps_max"),
    ],
)
def test_the_period_shown_is_the_one_in_force_and_the_bound_of_most_is_named(bounds, named):
    core = empty_core()
    core.policy_engine.state.cadence = Cadence(period_s=60.0)
    for name, bound, period_s in zip("abc", bounds, (1.2, 1.3, 60.0), strict=True):
        at_pace(core, name, period_s, bound)
    told = read_status(plain(core))
    assert (told.cadence.period_s, told.cadence.aim_s, told.cadence.bound) == (1.3, 60.0, named)
    assert [one.bound for one in told.devices] == bounds
    text = joined(shown(told))
    assert "fleet: period 1.30 s" in text
    assert (f"target 60.00 s: limited by {named}" in text) == bool(named)


def test_every_bound_has_words():
    assert set(BOUNDS) == set(get_args(Bound)) - {""}


def test_alarms_have_a_cause_and_a_remedy():
    alarms = [alarm("shed", remedy=remedy) for remedy in ("alert",)]
    alarms += [alarm("", "the loss is 9", remedy, since_s=120.2) for remedy in REMEDIES]
    text = joined(shown(status([device("shed")], alarms=alarms, rollbacks=2)))
    assert "shed warned for 90 s: loss 8, the fleet's 0.05 to exclude a device with a warning: " in text
    for act in REMEDIES.values():
        assert f"alarm: fleet, for 2 min: the loss is 9; {act}" in text
    assert "2 rollbacks" in text


def test_every_remedy_of_a_watch_has_words():
    for watch in (*Monitor().detectors, UpdateNormDetector(), NotFiniteDetector()):
        assert watch.remedy in REMEDIES


def test_a_disk_that_cannot_be_written():
    assert "folder" not in shown(status())
    text = joined(shown(status(disk_trouble="No space left on device")))
    assert "cannot write the run's folder: No space left on device; the hub accepts no updates" in text
    text = joined(shown(status(disk_trouble="No space left on device", durability="checkpoint")))
    assert "No space left on device; training continues, but a crash of the hub loses" in text
    assert "version 7 (5 on disk)" in joined(shown(status(version=7, version_durable=5)))


def test_evaluations():
    last, best = EvaluationStatus(40, 0.25, 0.9125), EvaluationStatus(30, 0.2, None)
    assert "evaluat" not in shown(status())
    text = shown(status(evaluation=last, best=last))
    assert "evaluation: version 40, loss 0.25, accuracy 91.25%" in text
    assert "best" not in text
    assert "best: version 30, loss 0.2 " in joined(shown(status(evaluation=last, best=best)))
