"""The alarms of a run with begin and end, computed from its journal."""

import json

import numpy as np
import pytest

import edgeasync
from edgeasync import Parameter, ParameterSpec, Policy, StepResult, Stop
from edgeasync.cli.output import Printer
from edgeasync.cli.replay import print_alarms
from edgeasync.durable.run_alarms import list_alarms
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor, NotFiniteDetector
from tests.support.programs.outputs import check_lines

WORDS = "its updates or their losses are not finite: check its data for missing or huge values"
POLICY = Policy(
    aggregate=ImmediateAggregator(),
    frequency=FixedFrequency(local_steps=1),
    monitor=Monitor(detectors=(NotFiniteDetector(count_max=2),), calm_updates=2),
)


class Unsteady:
    """A trainer whose updates 3 to 6, 12 and 13 are not finite."""

    spec = ParameterSpec((Parameter("weight", (4,)),))

    def __init__(self):
        self._steps = 0

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._steps += 1
        self._parameters += np.nan if self._steps in (3, 4, 5, 6, 12, 13) else 0.01
        return StepResult(loss=1.0, examples=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that ends with update 14, the eighth that counts."""
    folder = tmp_path_factory.mktemp("alarms") / "run"
    edgeasync.train({"weight": np.zeros(4)}, [Unsteady()], run=folder, policy=POLICY, until=Stop(updates=8))
    return folder


def times(run):
    """The hub's time of each update, by its number."""
    found = {}
    replay = RunReplay(run)
    replay.tell(lambda line: found.update({line.seq: line.hub_s} if line.event == "update" else {}) or True)
    replay.close()
    return found


def test_an_alarm_has_begin_and_end_and_one_that_lasts_has_none(run):
    at = times(run)
    first, second = list_alarms(run)
    assert (first.device, first.cause, first.begin_s, first.end_s) == ("worker-1", WORDS, at[4], at[8])
    assert (second.begin_s, second.end_s) == (at[13], None)


def test_alarms_up_to_an_entry(run):
    entry = {}
    replay = RunReplay(run)
    replay.tell(lambda line: entry.update({line.seq: line.entry} if line.event == "update" else {}) or True)
    replay.close()
    assert list_alarms(run, until=entry[3]) == []
    (active,) = list_alarms(run, until=entry[7])
    assert active.end_s is None


def test_alarms_are_printed_as_a_table_and_as_lines(run, capsys):
    print_alarms(run, None, None, [], Printer(json=False), trust_code=False)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["begin", "end", "device", "cause"]
    assert first.endswith(WORDS)
    assert "active" in second
    print_alarms(run, None, None, [], Printer(json=True), trust_code=False)
    said = capsys.readouterr().out
    check_lines(("replay", "--alarms", "--json"), said)
    assert [json.loads(line)["end_s"] is None for line in said.splitlines()] == [False, True]
    with pytest.raises(ConfigError, match="--alarms prints only alarms; remove --export"):
        print_alarms(run, None, None, ["--export"], Printer(json=False), trust_code=False)
