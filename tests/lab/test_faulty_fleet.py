"""Whoever looks at the status of a fleet of 30 finds all faulty devices within three minutes, and no others."""

import re

import pytest

from tests.support.programs.faulty_fleet import NAMED_BY, FaultyFleet
from tests.support.size import repetitions

pytestmark = pytest.mark.process

WATCH_S = 180.0
PERSISTENT_S = 60.0
"""An honest device is named persistently if every look of this last time names it."""


if repetitions("fleets with faults"):

    @pytest.mark.parametrize("seed", range(repetitions("fleets with faults")))
    def test_all_seven_faults_are_named_and_nothing_else(commands, seed):
        named_s, looks = {}, []
        with FaultyFleet(commands, seed) as fleet:
            fleet.begin()
            for passed_s, words in fleet.watch(WATCH_S):
                looks.append((passed_s, set(words)))
                for fault, name in fleet.faulty.items():
                    if re.search(NAMED_BY[fault], words.get(name, "")):
                        named_s.setdefault(fault, passed_s)
            shown = commands.run("status", "--hub", fleet.address).stdout
        assert named_s.keys() == NAMED_BY.keys(), (fleet.faulty, words)
        for name in fleet.faulty.values():
            assert re.search(rf"^{name} +\w.*(?=\n)", shown.partition("needs attention: ")[2], re.MULTILINE), shown
        last = [names for passed_s, names in looks if passed_s > WATCH_S - PERSISTENT_S]
        assert len(last) > 5
        assert set.intersection(*last) - set(fleet.faulty.values()) == set()
