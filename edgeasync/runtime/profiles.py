"""Default settings per kind of board, selected by the machine's name and the processor's name.

The settings are estimates from data sheets, not measurements on such boards. A profile sets neither
the micro batch size, which depends on free memory, nor the pace, which depends on `[throttle]`.
"""

import os
import re
from typing import Literal, TypeVar

import msgspec

from edgeasync.host.readings import Readings
from edgeasync.runtime.device_settings import DeviceSection

Device = TypeVar("Device", bound=DeviceSection)


class Profile(msgspec.Struct, frozen=True):
    """Defaults for a kind of board: the number of cores per step, and the execution provider."""

    name: str
    threads: int
    provider: Literal["auto", "cpu"] = "cpu"


BOARDS = (
    (r"Raspberry Pi Zero 2", Profile("Raspberry Pi Zero 2 W", 2)),
    (r"Raspberry Pi (?:Compute Module )?4", Profile("Raspberry Pi 4", 3)),
    (r"Raspberry Pi (?:Compute Module )?5", Profile("Raspberry Pi 5", 3)),
    (r"Orin", Profile("Jetson Orin", 4, "auto")),
)
"""Patterns of model names of boards, each with its profile."""

X86_MINI = Profile("x86 mini", 3)
X86_MINI_PROCESSORS = r"\b(?:N[0-9]{2,3}|[JN][0-9]{4}|Atom|Celeron)\b"
"""Pattern of processor names of small x86 machines."""


def find_profile(board: str, processor: str) -> Profile | None:
    """Return the profile that matches a board's model name or its processor's name, if any."""
    for pattern, profile in BOARDS:
        if re.search(pattern, board):
            return profile
    return X86_MINI if re.search(X86_MINI_PROCESSORS, processor) else None


def with_profile(section: Device, readings: Readings) -> tuple[Device, Profile | None]:
    """Return the settings with this machine's profile as defaults, and the profile itself."""
    profile = find_profile(readings.board(), readings.processor().name)
    if profile is None:
        return section, None
    threads = section.threads or min(profile.threads, len(os.sched_getaffinity(0)))
    provider = profile.provider if section.provider == "auto" else section.provider
    return msgspec.structs.replace(section, threads=threads, provider=provider), profile
