"""A simulated fleet for what the hub decides about its devices: digits or smartwatch data, unequal speeds, faults.

`build(case)` makes the fleet, `Fleet.run` lets it train. All is drawn from the seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks import smartwatch
from benchmarks.simulated import DIGITS, EXAMPLES_MIN, LIVENESS, accuracy_of, split_digits, start_device
from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings, Limits
from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import dirichlet, iid
from edgeasync.policies.policy import Policy
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile

FLIPPED = "flipped axis"
"""A fault of the smartwatch alone."""

SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 10.0)
"""How many times longer than the fastest device's a local step takes."""

STEP_S = 0.01
LINK = LinkProfile(5e6, 5e6, 0.005)
LEARNING_RATES = {"digits": 0.1, "smartwatch": 0.05}

Fault = Callable[[Dataset, int, np.random.Generator], Dataset]
"""Makes a spoilt device's data of its own: the data, the number of classes, a source of chance."""


def _shuffled(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x, random.permutation(data.y))


def _off_by_one(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x, (data.y + 1) % classes)


def _scaled(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x * np.float32(1000.0), data.y)


def _constant(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(np.repeat(data.x[:1], len(data), axis=0), data.y)


def _one_class(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:
    return Dataset(data.x, np.full_like(data.y, random.integers(classes)))


def _flipped_axis(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    x = data.x.copy().reshape(len(data), smartwatch.WINDOW, smartwatch.SENSORS)
    x[:, :, 0] *= -1.0
    return Dataset(x.reshape(data.x.shape), data.y)


FAULTS: dict[str, Fault] = {
    "shuffled labels": _shuffled,
    "labels off by one": _off_by_one,
    "inputs times 1000": _scaled,
    "constant input": _constant,
    "one class": _one_class,
    FLIPPED: _flipped_axis,
}


@dataclass(frozen=True)
class Case:
    """One run: its data, its devices, which of them are spoilt (number to fault), and which are not there.

    Devices are switched on `apart_s` after one another. A quiet hub is one as the daemon runs it.
    """

    seed: int
    data: str = "digits"
    alpha: float | None = None
    policy: Policy = field(default_factory=Policy)
    speeds: tuple[float, ...] = SPEEDS
    link: LinkProfile = LINK
    codec: CodecSettings = FLOAT32
    spoilt: Mapping[int, str] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()
    apart_s: float = 0.0
    quiet: bool = False


@dataclass
class Fleet:
    """A fleet that trains in virtual time."""

    clock: VirtualClock
    hub: SimulatedHub
    devices: list[SimulatedDevice]
    model: MlpModel
    held_out: Dataset

    def run(self, until_s: float, *, done: Callable[[], bool] = lambda: False) -> None:
        """Let the fleet train up to a time, or until `done`."""
        self.clock.run(done, until_s)

    @property
    def accuracy(self) -> float:
        """The share of held-out examples that the hub's model classifies rightly."""
        return accuracy_of(self.model, self.hub.model, self.held_out)

    @property
    def bytes_sent(self) -> int:
        """All bytes on all links so far."""
        return sum(device.up.bytes_sent + device.down.bytes_sent for device in self.devices)


def build(case: Case, *, durable: bool = False) -> Fleet:
    """Make the fleet of a case and switch it on; a durable hub can be killed and started again."""
    model, parts, held_out = _data(case)
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=model.spec,
        initial=model.initial(case.seed),
        policy=case.policy,
        settings=HubCoreSettings(
            liveness=LIVENESS,
            limits=Limits(updates_held_max=256, snapshots_max=256),
            codec=case.codec,
            quiet=case.quiet,
        ),
        seed=case.seed,
        disk=SimulatedDisk(case.seed) if durable else None,
    )
    hub.start()
    devices = []
    for number, (speed, part) in enumerate(zip(case.speeds, parts, strict=True)):
        if number in case.left_out:
            continue
        if number in case.spoilt:
            random = np.random.default_rng([case.seed, number])
            parts[number] = FAULTS[case.spoilt[number]](part, model.classes, random)
        device = start_device(
            clock,
            hub,
            model,
            number,
            parts[number],
            learning_rate=LEARNING_RATES[case.data],
            step_s=speed * STEP_S,
            link=case.link,
            seed=case.seed,
            keeps=durable,
            start_s=number * case.apart_s,
        )
        devices.append(device)
    return Fleet(clock, hub, devices, model, held_out)


def _data(case: Case) -> tuple[MlpModel, list[Dataset], Dataset]:
    count = len(case.speeds)
    if case.data == "smartwatch":
        people, held_out = smartwatch.split_by_person()
        order = np.random.default_rng(case.seed).permutation(len(people))[:count]
        return smartwatch.MODEL, [people[person] for person in order], held_out
    training, held_out = split_digits()
    if case.alpha is None:
        return DIGITS, iid(training, count, case.seed), held_out
    parts = dirichlet(training, count, case.alpha, case.seed, examples_min=EXAMPLES_MIN)
    return DIGITS, parts, held_out
