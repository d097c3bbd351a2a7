"""Many devices that come and go, and many that come at once; `crowds.py` has the long form."""

import pytest

from tests.support.crowds import BACK_S, WELCOMED_S, churn, joins

pytestmark = pytest.mark.process


def test_devices_that_come_and_go_are_missed_and_back_soon_and_nothing_is_lost(commands):
    seen = churn(commands, processes=8, devices=5, turns=2)
    assert seen["times_a_device_was_killed"] == 10
    assert seen["missed_s"][0] < BACK_S, seen
    assert seen["answered_again_s"][0] < BACK_S, seen


def test_hundreds_of_devices_are_members_again_soon_after_a_restart(commands):
    seen = joins(commands, count=500)
    assert seen["updates_answered"] >= 1000
    ((*_, last_s),) = seen["listens_then_joined_first_p50_p99_last_s"]
    assert last_s < WELCOMED_S, seen
