"""Many devices that come and go, and many that come at once; `benchmarks.comeback` has the long form."""

import pytest

from tests.support.programs.crowds import churn, joins
from tests.support.size import repetitions

pytestmark = pytest.mark.process


def test_devices_that_come_and_go_are_missed_and_back_and_nothing_is_lost(commands):
    turns = repetitions("times that a tenth of a crowd is killed")
    seen = churn(commands, processes=8, devices=5, turns=turns)
    assert seen["times_a_device_was_killed"] == 5 * turns
    assert seen["hashes_checked"] >= seen["updates_acknowledged"] > 10


def test_hundreds_of_devices_are_members_again_after_a_restart(commands):
    count = repetitions("devices that join at once")
    seen = joins(commands, count=count)
    assert seen["updates_answered"] >= 2 * count
