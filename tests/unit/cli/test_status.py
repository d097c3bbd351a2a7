"""What `edgeasync status` tells people, on a terminal of 100 columns."""

import io
from typing import get_args

import pytest
from rich.console import Console

from edgeasync.cli.output import Printer
from edgeasync.cli.status import BOUNDS, REMEDIES, describe_status, print_status, print_whole
from edgeasync.core.hub.events import HubReceived
from edgeasync.policies.frequency import Bound, Cadence
from edgeasync.policies.monitor import Monitor, NotFiniteDetector, UpdateNormDetector
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import Hello
from tests.support.parts.hub_bench import HubBench

CAUSE = "updates point apart (mean cosine 0.05)"
DEVICE = {
    "state": "quarantined",
    "staleness": 123,
    "local_steps": 128,
    "last_seen_s": 12.34,
    "examples_per_s": 123456.7,
    "updates_applied": 1234567,
    "loss": 1234.5678,
    "assigned_steps": 100000,
    "why": f"on its way; at most 100000 steps; period 12.3 s, shortened: {CAUSE}; hurried against divergence",
    "step_s": 0.0123,
    "talk_s": 1.5,
    "talk_share": 0.333,
    "period_s": 12.3456,
    "push_codec": "top_k(0.1)+int8",
    "bytes_up": 123_400_000_000,
    "bytes_down": 400_000_000,
    "round_trip_s": 0.1234,
    "bandwidth_bytes_per_s": 1234567,
}


def empty_status(policy=None):
    """The status of a hub that nobody has spoken to."""
    core = HubBench(policy or Policy()).core
    return core, core.status(0.0) | {"address": "tcp://127.0.0.1:5555", "pid": 42, "version": 7}


def shown(status, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(describe_status(status))
    return console.file.getvalue()


def joined(text):
    """The text without its line breaks and padding."""
    return " ".join(text.split())


def test_a_hub_that_nobody_has_spoken_to():
    _, status = empty_status()
    lines = shown(status).splitlines()
    assert lines[0].endswith("version 7")
    assert lines[2] == "fleet: no period yet"
    assert len(lines) == 4, "and the heading of an empty table"


@pytest.mark.parametrize("width", [80, 100])
def test_every_device_has_a_reason_and_nothing_is_cut(width):
    _, status = empty_status()
    names = [f"greenhouse-{number}" for number in range(3)]
    text = shown(status | {"devices": [DEVICE | {"id": name} for name in names]}, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    _, _, intervals = text.partition("\n\n")
    for words in (*names, "100000", "12.3 ms", "12.35 s", "33%"):
        assert words in intervals
    words = intervals.split()
    for word in DEVICE["why"].split():
        assert words.count(word) >= len(names)


def long_fleet():
    """The status of devices with long names, some of which say why they are slow."""
    _, status = empty_status()
    slow = {"state": "training", "pace_percent": 50, "pace_reason": "on battery, 76 C", "day_left_bytes": 123456}
    return status | {"devices": [DEVICE | slow | {"id": f"greenhouse-{number:020}"} for number in range(3)]}


CELLS = ("1234567", "123457", "1.23e+03", "100000", "12.35 s", "124 GB, 123 kB left today")


@pytest.mark.parametrize("width", [40, 80])
def test_names_and_numbers_are_whole_where_they_do_not_fit(width):
    """A terminal wraps what is too long for it; a name or a number that is cut is a wrong one."""
    status = long_fleet()
    console = Console(width=width, file=io.StringIO())
    print_whole(describe_status(status), console)
    text = console.file.getvalue()
    assert "…" not in text
    for word in (*CELLS, *(device["id"] for device in status["devices"])):
        assert word in text


def test_what_goes_into_a_pipe_has_a_line_for_each_device(capsys):
    told = long_fleet()
    print_status(told, "tcp://127.0.0.1:5555", Printer(json=False))
    lines = capsys.readouterr().out.splitlines()
    for device in told["devices"]:
        row, interval = (line for line in lines if line.startswith(device["id"]))
        assert "training at 50 %, on battery, 76 C" in row
        assert row.rstrip().endswith("124 GB, 123 kB left today")
        assert interval.rstrip().endswith(device["why"])


@pytest.mark.parametrize(
    ("bytes_up", "bytes_down", "words"),
    [(0, 0, "0 B"), (700, 299, "999 B"), (500, 500, "1 kB"), (999_499, 1, "1 MB"), (10**9, 10**8, "1.1 GB")],
)
def test_traffic_is_told_so_that_people_can_read_it(bytes_up, bytes_down, words):
    _, status = empty_status()
    device = DEVICE | {"id": "shed", "bytes_up": bytes_up, "bytes_down": bytes_down}
    heading, row = shown(status | {"devices": [device]}).splitlines()[3:5]
    assert heading.split()[-1] == "traffic"
    assert row.rstrip().endswith(f" {words}")


def test_a_device_without_an_assignment_has_no_interval_yet():
    _, status = empty_status()
    new = DEVICE | {"id": "new", "why": "", "assigned_steps": 0}
    assert "next steps" not in shown(status | {"devices": [new]})
    text = shown(status | {"devices": [new, DEVICE | {"id": "old"}]})
    assert text.partition("next steps")[2].count("new") == 0


def test_a_device_that_rests_before_its_first_exchange_is_said_to():
    _, status = empty_status()
    new = DEVICE | {"id": "new", "why": "", "assigned_steps": 0, "rest_s": 7200.0}
    assert "rests for 7200 s" in joined(shown(status | {"devices": [new]}))


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
        ({"state": "training", "pace_percent": 50, "pace_reason": "76 C"}, "training at 50 %, 76 C"),
        ({"state": "training", "pace_percent": 40, "pace_reason": ""}, "training at 40 %"),
        ({"state": "paused", "pace_percent": 100, "pace_reason": ""}, "paused "),
    ],
)
def test_why_a_device_does_not_train_at_full_pace(told, words):
    _, status = empty_status()
    assert words in shown(status | {"devices": [DEVICE | told | {"id": "pi"}]})


def test_the_tempo_of_the_fleet():
    core, _ = empty_status()
    core.policy_engine.state.cadence = Cadence(period_s=0.52, gain=0.7, cause=CAUSE)
    at_pace(core, "a", 0.52)
    core.policy_engine.state.evaluations.learning_rate_factor = 0.5
    text = joined(shown(core.status(0.0) | {"address": "", "pid": 0}))
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
    core, _ = empty_status()
    core.policy_engine.state.cadence = Cadence(period_s=60.0)
    for name, bound, period_s in zip("abc", bounds, (1.2, 1.3, 60.0), strict=True):
        at_pace(core, name, period_s, bound)
    status = core.status(0.0)
    assert (status["cadence"]["period_s"], status["cadence"]["aim_s"], status["cadence"]["bound"]) == (
        1.3,
        60.0,
        named,
    )
    assert [device["bound"] for device in status["devices"]] == bounds
    text = joined(shown(status | {"address": "", "pid": 0}))
    assert "fleet: period 1.30 s" in text
    assert (f"target 60.00 s: limited by {named}" in text) == bool(named)


def test_every_bound_has_words():
    assert set(BOUNDS) == set(get_args(Bound)) - {""}


def test_alarms_have_a_cause_and_a_remedy():
    _, status = empty_status()
    words = "its last 3 updates are not finite"
    alarms = [
        {"device": "shed", "remedy": remedy, "cause": words, "since_s": 90.0} for remedy in ("alert", "probation")
    ]
    alarms += [{"device": "", "remedy": remedy, "cause": "the loss is 9", "since_s": 120.2} for remedy in REMEDIES]
    text = joined(shown(status | {"alarms": alarms, "rollbacks": 2}))
    assert f"alarm: shed, for 90.00 s: {words}; 'edgeasync device quarantine shed' excludes it" in text
    assert f"alarm: shed, for 90.00 s: {words}; its updates have limited weight" in text
    for act in REMEDIES.values():
        assert f"alarm: fleet, for 120 s: the loss is 9; {act}" in text
    assert "2 rollbacks" in text


def test_every_remedy_of_a_watch_has_words():
    for watch in (*Monitor().detectors, UpdateNormDetector(), NotFiniteDetector()):
        assert watch.remedy in REMEDIES


def test_a_disk_that_cannot_be_written():
    _, status = empty_status()
    assert "folder" not in shown(status | {"disk_trouble": ""})
    text = joined(shown(status | {"disk_trouble": "No space left on device"}))
    assert "cannot write the run's folder: No space left on device; the hub accepts no updates" in text
    text = joined(shown(status | {"disk_trouble": "No space left on device", "durability": "checkpoint"}))
    assert "No space left on device; training continues, but a crash of the hub loses" in text
    assert "version 7 (5 on disk)" in joined(shown(status | {"version": 7, "version_durable": 5}))


def test_evaluations():
    _, status = empty_status()
    last = {"version": 40, "loss": 0.25, "accuracy": 0.9125}
    best = {"version": 30, "loss": 0.2, "accuracy": None}
    assert "evaluat" not in shown(status)
    text = shown(status | {"evaluation": last, "best": last})
    assert "evaluation: version 40, loss 0.25, accuracy 91.25%" in text
    assert "best" not in text
    assert "best: version 30, loss 0.2\n" in joined_lines(shown(status | {"evaluation": last, "best": best}))


def joined_lines(text):
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_a_hub_of_an_earlier_version_is_shown_too():
    _, status = empty_status()
    for key in ("cadence", "fleet", "learning_rate_factor", "rollbacks", "alarms", "evaluation", "best"):
        del status[key]
    old = {
        key: value
        for key, value in DEVICE.items()
        if key not in ("assigned_steps", "why", "step_s", "talk_s", "talk_share", "period_s", "bytes_up")
    }
    assert "shed" in shown(status | {"devices": [old | {"id": "shed"}]})
