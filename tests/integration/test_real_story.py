"""What a benchmark on real processes reads from the journal of a run that has ended."""

import numpy as np
import pytest

from benchmarks.real_fleet import read_story
from benchmarks.security_poison_fleet import HostileTrainer
from edgeasync import Stop, train
from tests.support.parts.hubs import SPEC, Adder

MODEL = {name: np.zeros(array.shape) for name, array in SPEC.views(np.zeros(SPEC.length, np.float32)).items()}


def test_a_story_tells_the_last_model_the_steps_and_who_was_warned_of(tmp_path):
    trainers = [Adder(), Adder(), HostileTrainer(Adder(), "NaN", 1)]
    run = train(MODEL, trainers, run=tmp_path, until=Stop(updates=200))
    story = read_story(tmp_path)
    (bad,) = [device for device in story.devices if device["updates_rejected"]]
    assert list(story.warned) == [bad["id"]] == [alarm.device for alarm in story.alarms]
    assert 1 <= story.warned[bad["id"]] <= bad["pushes_answered"]
    assert story.steps >= sum(device["updates_applied"] for device in story.devices) >= run.updates
    assert story.rollbacks == 0
    np.testing.assert_array_equal(story.models[-1], np.concatenate([run.arrays[name].ravel() for name in MODEL]))


def test_a_story_that_begins_later_than_its_run_is_refused(tmp_path):
    train(MODEL, [Adder()], run=tmp_path, until=Stop(updates=20))
    for segment in tmp_path.glob("journal*"):
        segment.unlink()
    with pytest.raises(RuntimeError, match="the journal begins at version"):
        read_story(tmp_path)
