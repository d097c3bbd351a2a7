"""Boards by the names that they give themselves, and what an agent does there."""

import os

import pytest

from edgeasync.host.readings import Readings
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.profiles import find_profile, with_profile
from tests.support.boards.fake_sys import MODEL, FakeSys


@pytest.mark.parametrize(
    ("board", "processor", "name"),
    [
        ("Raspberry Pi Zero 2 W Rev 1.0", "", "Raspberry Pi Zero 2 W"),
        ("Raspberry Pi 4 Model B Rev 1.5", "", "Raspberry Pi 4"),
        ("Raspberry Pi Compute Module 4 Rev 1.0", "", "Raspberry Pi 4"),
        ("Raspberry Pi 5 Model B Rev 1.0", "", "Raspberry Pi 5"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", "", None),
        ("NVIDIA Jetson Orin Nano Developer Kit", "", "Jetson Orin"),
        ("", "Intel(R) N100", "x86 mini"),
        ("Standard PC", "Intel(R) Celeron(R) J4125 CPU @ 2.00GHz", "x86 mini"),
        ("Standard PC", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", None),
        ("\x1b[2J" * 1000, "\0" * 1000, None),
        ("", "", None),
    ],
)
def test_a_board_is_known_by_its_name(board, processor, name):
    found = find_profile(board, processor)
    assert (None if found is None else found.name) == name


def test_a_profile_fills_what_the_settings_leave_open(tmp_path):
    fake = FakeSys(tmp_path)
    assert with_profile(AgentSection(), Readings(fake.root)) == (AgentSection(), None)
    assert AgentSection().cores_used == 1
    fake.write(MODEL, "Raspberry Pi 5 Model B Rev 1.0\0")
    section, profile = with_profile(AgentSection(), Readings(fake.root))
    assert (section.threads, section.provider) == (min(3, len(os.sched_getaffinity(0))), "cpu")
    assert profile.name == "Raspberry Pi 5"
    own = AgentSection(threads=1, provider="cuda")
    assert with_profile(own, Readings(fake.root))[0] == own
