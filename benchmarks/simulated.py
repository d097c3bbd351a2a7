"""What the simulated fleets of benchmarks share: digits to learn, a model of them, and a device that trains it."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from edgeasync.core.hub.settings import Liveness
from edgeasync.data import load_digits
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload

DIGITS = MlpModel(inputs=64, hidden=(64,), classes=10)
HELD_OUT = 0.2
BATCH = 32
EXAMPLES_MIN = 16
"""Of a device, however its labels are skewed."""

LIVENESS = Liveness(heartbeat_s=0.5, lease_s=1.5)


@lru_cache
def split_digits() -> tuple[Dataset, Dataset]:
    """Return the digits to train on and those held out: the same for all seeds, since some splits are harder."""
    dataset = load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(dataset))
    held = round(HELD_OUT * len(dataset))
    return dataset.take(order[held:]), dataset.take(order[:held])


def accuracy_of(
    model: MlpModel, parameters: np.ndarray[tuple[int], np.dtype[np.float32]], held_out: Dataset
) -> float:
    """Return the share of examples that are classified rightly."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float((model.predict(parameters, held_out.x) == held_out.y).mean())


def start_device(
    clock: VirtualClock,
    hub: SimulatedHub,
    model: MlpModel,
    number: int,
    part: Dataset,
    *,
    learning_rate: float,
    step_s: float,
    link: LinkProfile,
    seed: int,
    name: str = "",
    keeps: bool = False,
    start_s: float = 0.0,
    local: LocalParameters | None = None,
    stream: Iterator[Batch] | None = None,
) -> SimulatedDevice:
    """Switch a device on, now or later, that runs SGD. Its examples' order depends on the seed and its number.

    Without a name it is called after its number. With `keeps` it survives a restart with all that it had. A
    `stream` takes the place of the examples.
    """
    stream = stream or batches(part, BATCH, 1000 * seed + number)
    device = SimulatedDevice(
        hub,
        name or f"device-{number + 1}",
        GradientTrainer(model.spec, model.gradient, (SGD(learning_rate=learning_rate),), stream),
        step_s=step_s,
        link=link,
        workload=SimulatedWorkload(examples=len(part), local=local),
        seed=seed,
        keeps=keeps,
    )
    if start_s:
        clock.at(start_s, device.start)
    else:
        device.start()
    return device
