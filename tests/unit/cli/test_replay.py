"""What `edgeasync replay` prints of a run that was trained in this process."""

import json

import numpy as np
import pytest

from edgeasync import Policy, Stop, train
from edgeasync.cli.output import Printer
from edgeasync.cli.replay import replay_run, verify_replay
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.training.numpy_models import SoftmaxModel

DATA = np.eye(4), np.arange(4)


def trained(path, delay_steps):
    policy = Policy(
        aggregate=ImmediateAggregator(), frequency=FixedFrequency(local_steps=6), delay_steps=delay_steps
    )
    train(SoftmaxModel(inputs=4, classes=4), DATA, workers=1, run=path, policy=policy, until=Stop(updates=4))
    return path


def replayed(run, *, as_json):
    replay_run(run, None, None, None, Printer(json=as_json), trust_code=False)


@pytest.mark.parametrize("delay_steps", [0, 2, 6])
def test_the_delay_of_each_update_is_told_as_it_was(tmp_path, capsys, delay_steps):
    run = trained(tmp_path / "run", delay_steps)
    replayed(run, as_json=True)
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    updates = [line for line in lines if line["event"] == "update"]
    assert [(line["local_steps"], line["delay_steps"]) for line in updates[:4]] == [
        (6, 0),
        *[(6, delay_steps)] * 3,
    ]
    replayed(run, as_json=False)
    words = [line for line in capsys.readouterr().out.splitlines() if "seq 2," in line]
    assert f", 6 steps from version 1{f', delay {delay_steps}' * bool(delay_steps)}: applied" in words[0]


def test_no_other_flag_goes_with_verify(tmp_path):
    with pytest.raises(ConfigError, match="--verify replays the whole run; remove --until, --from"):
        verify_replay(tmp_path, {"--until": 0, "--from": "latest"}, Printer(json=False), trust_code=False)
