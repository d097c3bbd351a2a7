"""Simulated fleets in virtual time: digits, a model, a hub and its devices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness
from edgeasync.data import load_digits
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy, PolicySet
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.trainer import Trainer
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload

DIGITS = MlpModel(inputs=64, hidden=(64,), classes=10)
HELD_OUT = 0.2
BATCH = 32
EXAMPLES_MIN = 16
"""Least examples of a device, however skewed the labels are."""

STEP_S = 0.01
LINK = LinkProfile(5e6, 5e6, 0.005)
LEARNING_RATES = {"digits": 0.1, "smartwatch": 0.05}
LIVENESS = Liveness(heartbeat_s=0.5, lease_s=1.5)
MANY = Limits(updates_held_max=256, snapshots_max=256)
SETTINGS = HubCoreSettings(liveness=LIVENESS, limits=MANY, codec=FLOAT32)
LAST = 8
"""The final accuracy is the mean of this many evaluations."""


@lru_cache
def split_digits() -> tuple[Dataset, Dataset]:
    """Return training digits and held-out digits.

    They are the same for all seeds, because some splits are harder.
    """
    dataset = load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(dataset))
    held = round(HELD_OUT * len(dataset))
    return dataset.take(order[held:]), dataset.take(order[:held])


def accuracy_of(
    model: MlpModel, parameters: np.ndarray[tuple[int], np.dtype[np.float32]], held_out: Dataset
) -> float:
    """Return the share of correctly classified examples."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float((model.predict(parameters, held_out.x) == held_out.y).mean())


@dataclass(frozen=True, kw_only=True)
class Member:
    """A device that runs SGD on its data, or on `stream` with `gradient`.

    With `keeps`, it survives a restart with its whole state. It is switched on at `start_s`. `wrap`
    changes its trainer, and `make` creates the device.
    """

    data: Dataset
    learning_rate: float
    step_s: float = STEP_S
    link: LinkProfile = LINK
    name: str = ""
    keeps: bool = False
    start_s: float = 0.0
    local: LocalParameters | None = None
    stream: Iterable[Batch] | None = None
    gradient: Callable[..., float] | None = None
    sender: Sender = ANYBODY
    wrap: Callable[[Trainer], Trainer] | None = None
    make: Callable[..., SimulatedDevice] = SimulatedDevice


class VirtualFleet:
    """A hub and its devices in virtual time.

    The seed determines everything. A durable hub may be killed.
    """

    def __init__(
        self,
        model: MlpModel,
        seed: int,
        *,
        policy: PolicySet | None = None,
        settings: HubCoreSettings = SETTINGS,
        durable: bool = False,
        make_hub: Callable[..., SimulatedHub] = SimulatedHub,
    ) -> None:
        self.model, self.seed = model, seed
        self.clock = VirtualClock()
        self.devices: list[SimulatedDevice] = []
        self.hub = make_hub(
            self.clock,
            spec=model.spec,
            initial=model.initial(seed),
            policy=policy or Policy(),
            settings=settings,
            seed=seed,
            disk=SimulatedDisk(seed) if durable else None,
        )
        self.hub.start()

    def add(self, member: Member, number: int | None = None) -> SimulatedDevice:
        """Switch on a device.

        The seed and `number` determine the order of its examples. Its default name contains
        `number`.
        """
        number = len(self.devices) if number is None else number
        stream = member.stream or batches(member.data, BATCH, 1000 * self.seed + number)
        optimizer = (SGD(learning_rate=member.learning_rate),)
        gradient = member.gradient or self.model.gradient
        trainer: Trainer = GradientTrainer(self.model.spec, gradient, optimizer, iter(stream))
        device = member.make(
            self.hub,
            member.name or f"device-{number + 1}",
            member.wrap(trainer) if member.wrap else trainer,
            step_s=member.step_s,
            link=member.link,
            workload=SimulatedWorkload(examples=len(member.data), local=member.local),
            seed=self.seed,
            keeps=member.keeps,
        )
        device.sender = member.sender
        self.devices.append(device)
        if member.start_s:
            self.clock.at(member.start_s, device.start)
        else:
            device.start()
        return device

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Train the fleet until a time, or until `done`."""
        self.clock.run(done, until_s)

    def accuracy(self, held_out: Dataset) -> float:
        """Return the share of examples that the hub's model classifies correctly."""
        return accuracy_of(self.model, self.hub.model, held_out)

    @property
    def bytes_sent(self) -> int:
        """All bytes on all links so far."""
        return sum(device.up.bytes_sent + device.down.bytes_sent for device in self.devices)
