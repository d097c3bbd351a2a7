"""What goes wrong in a simulated fleet, and when: by script, or drawn by seed.

A `FaultPlan` is a value: it can be printed, read again, and cut down to what still breaks something.
`FaultInjector` (`injector.py`) carries it out.
"""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from simulation.disk import Operations
from simulation.hub import Connections
from simulation.link_faults import SILENCE, LinkFaults

Way = Literal["both", "up", "down"]
Seconds = Annotated[float, Meta(ge=0.0)]


class _Fault(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="fault"):
    """Base of all faults."""


# -- the hub ---------------------------------------------------------------------------------------------------


class CrashHub(_Fault, frozen=True, tag="crash_hub"):
    """Kill the hub's process, or cut its power; it is started again in `off_s`, or not until all is healed.

    It may crash `again` soon after that, or during it.
    """

    power_cut: bool = False
    off_s: Seconds | None = 1.0
    connections: Connections = "silent"
    again: "CrashHubAtDisk | None" = None


class CrashHubAtDisk(_Fault, frozen=True, tag="crash_hub_at_disk"):
    """Crash the hub in the middle of the so-manieth thing that its disk is asked to do from now on.

    Only operations `of` a kind are counted.
    """

    operation: Annotated[int, Meta(ge=1)]
    of: Operations = "all"
    power_cut: bool = True
    off_s: Seconds | None = 1.0
    connections: Connections = "silent"
    again: "CrashHubAtDisk | None" = None


class RestoreBackup(_Fault, frozen=True, tag="restore_backup"):
    """Back the hub's disk up; in `after_s` end the hub, put the backup back, and start it again in `off_s`.

    With `empty` an empty disk is put in instead.
    """

    after_s: Seconds
    off_s: Seconds | None = 1.0
    connections: Literal["silent", "broken"] = "silent"
    empty: bool = False
    again: CrashHubAtDisk | None = None


class SlowDisk(_Fault, frozen=True, tag="slow_disk"):
    """Let every sync of the hub's disk take `sync_s`."""

    sync_s: Seconds
    for_s: Seconds


class FailingDisk(_Fault, frozen=True, tag="failing_disk"):
    """Let the next writes and syncs of the hub's disk fail."""

    writes: Annotated[int, Meta(ge=0)] = 0
    syncs: Annotated[int, Meta(ge=0)] = 0


class FullDisk(_Fault, frozen=True, tag="full_disk"):
    """Leave the hub's disk this number of bytes."""

    free_bytes: Annotated[int, Meta(ge=0)]
    for_s: Seconds


class ReadOnlyDisk(_Fault, frozen=True, tag="read_only_disk"):
    """Let nothing on the hub's disk be changed."""

    for_s: Seconds


# -- a device --------------------------------------------------------------------------------------------------


class CutPower(_Fault, frozen=True, tag="cut_power"):
    """Cut a device's power; it is on again in `off_s`, or not until all is healed."""

    device: str
    off_s: Seconds | None = 1.0


class HangTrainer(_Fault, frozen=True, tag="hang_trainer"):
    """Let a device take no local step for a while; then it continues."""

    device: str
    for_s: Seconds


class JumpClock(_Fault, frozen=True, tag="jump_clock"):
    """Let a device's clock show a later time all at once."""

    device: str
    by_s: Seconds


class Suspend(_Fault, frozen=True, tag="suspend"):
    """Let a device do nothing for a while; its clock may stand still meanwhile."""

    device: str
    for_s: Seconds
    clock_stands: bool = False


# -- a link ----------------------------------------------------------------------------------------------------


class Partition(_Fault, frozen=True, tag="partition"):
    """Let nothing through between a device and the hub, or one way; if it is `held`, it comes in the end."""

    device: str
    for_s: Seconds
    way: Way = "both"
    held: bool = False


class BadLink(_Fault, frozen=True, tag="bad_link"):
    """Let a device's messages meet with trouble for a while."""

    device: str
    for_s: Seconds
    trouble: LinkFaults
    way: Way = "both"


class BreakConnection(_Fault, frozen=True, tag="break_connection"):
    """Break a device's connection, so that it knows."""

    device: str


# -- an operator -----------------------------------------------------------------------------------------------


class QuarantineDevice(_Fault, frozen=True, tag="quarantine_device"):
    """Let an operator exclude a device, and release it in `for_s`; each order is repeated until it is answered."""

    device: str
    for_s: Seconds


DiskFault = CrashHubAtDisk | RestoreBackup | SlowDisk | FailingDisk | FullDisk | ReadOnlyDisk
HubFault = CrashHub | DiskFault
DeviceFault = CutPower | HangTrainer | JumpClock | Suspend | Partition | BadLink | BreakConnection
Fault = HubFault | DeviceFault | QuarantineDevice


# -- when ------------------------------------------------------------------------------------------------------


class At(msgspec.Struct, frozen=True, tag_field="when", tag="at"):
    """At a time."""

    time_s: Seconds
    fault: Fault


class WhenSteps(msgspec.Struct, frozen=True, tag_field="when", tag="steps"):
    """When a device has taken this number of local steps since it was switched on last."""

    device: str
    steps: Annotated[int, Meta(ge=0)]
    fault: Fault


class WhenVersion(msgspec.Struct, frozen=True, tag_field="when", tag="version"):
    """When the hub's model has come so far."""

    version: Annotated[int, Meta(ge=0)]
    fault: Fault


Planned = At | WhenSteps | WhenVersion


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults and when they happen, each once."""

    faults: tuple[Planned, ...] = ()

    @classmethod
    def read(cls, text: str) -> "FaultPlan":
        """Read what `write` wrote; empty lines and those that begin with `#` are left out.

        Raises `ValueError` for a line that is no planned fault.
        """
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        return cls(tuple([msgspec.json.decode(line, type=Planned) for line in lines]))

    def write(self) -> str:
        """Return the plan as text, one fault a line."""
        return "".join([f"{msgspec.json.encode(planned).decode()}\n" for planned in self.faults])

    def without(self, position: int) -> "FaultPlan":
        """Return the plan but for one of its faults."""
        return FaultPlan(self.faults[:position] + self.faults[position + 1 :])


# -- by seed ---------------------------------------------------------------------------------------------------


def draw_faults(seed: int, devices: Sequence[str], until_s: float, *, hub: bool = True) -> FaultPlan:
    """Draw what goes wrong up to a time; the same seed gives the same.

    At least one device crashes, and the hub, if it is to have faults, once or more.
    """
    random = Random(f"{seed}/faults")
    planned: list[Planned] = [_surely(_cut_power(random, devices), random, until_s)]
    if hub:
        planned.append(_surely(_crash_at_once(random), random, until_s))
        planned += [_planned(_crash(random), random, devices, until_s) for _ in range(random.randint(1, 3))]
        if random.random() < 0.4:
            operation = random.randint(1, 14)
            dies = CrashHubAtDisk(operation, power_cut=random.random() < 0.8, off_s=_seconds(random, 2.0))
            planned.append(At(0.0, RestoreBackup(0.0, 0.0, empty=True, again=dies)))  # while it begins
    for _ in range(random.randint(2, 9)):
        fault = _hub_fault(random) if hub and random.random() < 0.4 else _device_fault(random, devices)
        planned.append(_planned(fault, random, devices, until_s))
        if isinstance(fault, FailingDisk) and random.random() < 0.9:
            planned.append(_soon_after(planned[-1], CrashHub(power_cut=True), random))
    if random.random() < 0.5:
        excluded = QuarantineDevice(random.choice(devices), _seconds(random, 6.0))
        planned.append(_planned(excluded, random, devices, until_s))
    if random.random() < 0.3:
        trouble = _trouble(random)  # of all, all the time
        planned += [At(0.0, BadLink(device, until_s, trouble)) for device in devices]
    if random.random() < 0.15:
        echo = _echo(random)
        planned += [At(0.0, BadLink(device, until_s, echo)) for device in devices]
    return FaultPlan(tuple(planned))


def _surely(fault: Fault, random: Random, until_s: float) -> Planned:
    """Plan something for a time that comes before all is healed."""
    return At(_rounded(random.uniform(0.05, 0.95) * until_s), fault)


def _planned(fault: Fault, random: Random, devices: Sequence[str], until_s: float) -> Planned:
    match random.randrange(6):
        case 0:
            return WhenSteps(random.choice(devices), random.randint(1, 60), fault)
        case 1:
            return WhenVersion(random.randint(1, 30), fault)
    return At(_rounded(random.uniform(0.0, until_s)), fault)


def _soon_after(planned: Planned, fault: Fault, random: Random) -> Planned:
    match planned:
        case At():
            return At(_rounded(planned.time_s + random.uniform(0.0, 0.5)), fault)
        case WhenSteps():
            return WhenSteps(planned.device, planned.steps + random.randint(0, 4), fault)
        case WhenVersion():
            return WhenVersion(planned.version + random.randint(0, 3), fault)


def _crash(random: Random) -> CrashHub | CrashHubAtDisk:
    if random.random() < 0.2:  # a process that dies with content that was not synced, then a power cut
        cut = CrashHubAtDisk(random.randint(1, 8), off_s=_seconds(random, 2.0))
        return CrashHubAtDisk(random.randint(1, 40), "content", power_cut=False, again=cut)
    if random.random() < 0.7:
        return _crash_at_disk(random, _crash_at_disk(random, None) if random.random() < 0.4 else None)
    return _crash_at_once(random)


def _crash_at_once(random: Random) -> CrashHub:
    again = _crash_at_disk(random, None) if random.random() < 0.4 else None
    connections: Connections = random.choice(("silent", "broken", "kept"))
    return CrashHub(random.random() < 0.5, _seconds(random, 4.0), connections, again)


def _crash_at_disk(random: Random, again: CrashHubAtDisk | None) -> CrashHubAtDisk:
    connections: Connections = random.choice(("silent", "broken", "kept"))
    of: Operations = random.choice(("all", "names", "content"))
    operation = random.randint(1, 12 if of == "names" else 40)
    return CrashHubAtDisk(operation, of, random.random() < 0.6, _seconds(random, 4.0), connections, again)


def _hub_fault(random: Random) -> HubFault:
    match random.randrange(12):
        case 0:
            return SlowDisk(_rounded(random.uniform(0.01, 1.0)), _seconds(random, 4.0))
        case 1:
            return FailingDisk(writes=random.randint(1, 3))
        case 2 | 6:
            return FailingDisk(syncs=random.randint(1, 3))
        case 3:
            return FullDisk(random.randint(0, 20_000), _seconds(random, 4.0))
        case 4:
            return ReadOnlyDisk(_seconds(random, 3.0))
        case 5:
            after_s = _rounded(random.uniform(0.0, 5.0))
            again = _crash_at_disk(random, None) if random.random() < 0.4 else None
            empty = random.random() < 0.4
            return RestoreBackup(after_s, _seconds(random, 4.0), random.choice(("silent", "broken")), empty, again)
    return _crash(random)


def _cut_power(random: Random, devices: Sequence[str]) -> CutPower:
    return CutPower(random.choice(devices), off_s=_seconds(random, 4.0))


def _device_fault(random: Random, devices: Sequence[str]) -> DeviceFault:
    device = random.choice(devices)
    way: Way = random.choice(("both", "up", "down"))
    for_s = _seconds(random, 6.0)
    match random.randrange(10):
        case 0:
            return HangTrainer(device, for_s)
        case 1:
            return JumpClock(device, _seconds(random, 20.0))
        case 2:
            return Suspend(device, for_s, clock_stands=random.random() < 0.5)
        case 3 | 4:
            return Partition(device, for_s, way, held=random.random() < 0.5)
        case 5 | 6 | 7:
            return BadLink(device, _rounded(random.uniform(1.0, 10.0)), _trouble(random), way)
        case 8:
            return BreakConnection(device)
    return _cut_power(random, devices)


def _trouble(random: Random) -> LinkFaults:
    """Draw one or more kinds of trouble."""
    chances = [_rounded(random.uniform(0.05, 0.5)) if random.random() < 0.5 else 0.0 for _ in range(4)]
    lost, repeated, late, corrupt = chances if any(chances) else (0.2, 0.2, 0.2, 0.0)
    return LinkFaults(
        lost=lost,
        repeated=repeated,
        late=late,
        late_s=_seconds(random, 3.0) if late else 0.0,
        corrupt=corrupt,
    )


def _echo(random: Random) -> LinkFaults:
    """Draw trouble by which answers come once more when the next one is waited for."""
    repeated, late = [_rounded(random.uniform(0.2, 0.6)) for _ in range(2)]
    return LinkFaults(repeated=repeated, late=late, late_s=_rounded(random.uniform(0.2, 2.0)))


def _seconds(random: Random, most: float) -> float:
    """Draw a time: often short, at times nothing."""
    return _rounded(most * random.random() ** 2)


def _rounded(value: float) -> float:
    return round(value, 3)


def trouble_of(fault: Partition | BadLink, until_s: float) -> LinkFaults:
    """Return what a link fault that lasts until then does to messages."""
    if isinstance(fault, BadLink):
        return fault.trouble
    return msgspec.structs.replace(SILENCE, held_until_s=until_s if fault.held else None)
