"""Fine-tune openWakeWord's "hey Jarvis" on the corrections of eight homes; their sounds stay in the homes.

    python wake_word.py FOLDER

FOLDER contains recordings from record.py. The first eight homes train, and their later recordings test the
models. All other homes only test the shared model.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from detector import Detector, Sounds, corrections, read, tested
from features import published

from edgeasync import SGD, Agent, Dataset, Hub, Policy
from edgeasync.autodiff.export import export_model
from edgeasync.policies.schedules import CosineSchedule

CLASSIFIER = "hey_jarvis_v0.1"
HEAD = ["*.7.*"]  # the last layers of the network and of its verifier
FLEET = 8  # homes that train
BATCH = 32
PASSES, LEARNING_RATE = 20, 0.02
PUBLISHED, TRAINED = 0.5, 0.9  # thresholds of scores: openWakeWord's default, and one for trained models


@dataclass(frozen=True)
class Cost:
    """What training costs each home, and how long it takes for all."""

    examples: float
    steps: float
    step_s: float
    bytes_up: float
    bytes_down: float
    seconds: float

    def __str__(self) -> str:
        sent = f"{self.bytes_up / 1e6:.1f} MB sent, {self.bytes_down / 1e6:.1f} MB received"
        return f"a home: {self.steps:.0f} steps of {1e3 * self.step_s:.1f} ms, {sent}; {self.seconds:.0f} s in all"


@dataclass(frozen=True)
class Trained:
    """The trained models, one for all homes or one for each, and what they cost."""

    models: list[bytes]
    cost: Cost


def train(
    model: bytes, homes: Sequence[Dataset], folder: Path, *, local: Sequence[str], passes: int, rate: float
) -> Trained:
    """Train a fleet of homes; with `local`, each keeps its own values of these arrays."""
    (file := folder / "classifier.onnx").write_bytes(model)
    hub = Hub(
        file,
        loss="bce_with_logits",
        local=local,
        run=folder / "run",
        bind="tcp://127.0.0.1:*",
        optimizer=SGD(learning_rate=rate),
        batch_size=BATCH,
        policy=Policy(optimizer=(SGD(momentum=0.85), CosineSchedule(updates=passes))),
        settings={"codec": {"push": "int8"}},  # as in a home; on one machine the default is not to compress
    )
    with hub, ExitStack() as stack:
        began_s = time.monotonic()
        agents = [
            stack.enter_context(Agent(hub.address, data, name=f"home-{number}", epochs=1, seed=number))
            for number, data in enumerate(homes)
        ]
        while min(agent.updates_answered for agent in agents) < passes:
            time.sleep(0.01)
        seconds = time.monotonic() - began_s
        devices = hub.status()["devices"]
        arrays = [arrays_of(agent) for agent in agents] if local else [hub.snapshot()]
    count = float(np.mean([len(data) for data in homes]))
    cost = Cost(
        examples=count,
        steps=count / BATCH * passes,
        step_s=float(np.median([device["step_s"] for device in devices])),
        bytes_up=float(np.mean([device["bytes_up"] for device in devices])),
        bytes_down=float(np.mean([device["bytes_down"] for device in devices])),
        seconds=seconds,
    )
    return Trained([export_model(model, each) for each in arrays], cost)


def arrays_of(agent: Agent) -> dict[str, np.ndarray]:
    """Return the arrays of an agent's model, with those that it keeps to itself."""
    found: dict[str, np.ndarray] = {}

    def keep(arrays: dict[str, np.ndarray]) -> float:
        found.update({name: array.copy() for name, array in arrays.items()})
        return 0.0

    agent.evaluate(keep)
    return found


def show(
    name: str, models: Sequence[bytes], homes: dict[str, list[Sounds]], threshold: float
) -> dict[str, dict[str, float]]:
    """Print and return what models find in the fleet, and in other homes if one model is for all."""
    figures = {}
    for where, sounds in homes.items():
        if len(models) == 1 or where == "fleet":
            found = tested(models, sounds, threshold)
            print(f"{name:16} {where:12} {found}")
            figures[f"{name}, {where}"] = {
                "false alarms an hour": found.alarms_per_hour, "missed, %": found.missed_percent,
            }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a wake word on the corrections of homes.")
    parser.add_argument("folder", type=Path, help="with the recordings that record.py made")
    parser.add_argument("--model", type=Path, help="a classifier to use instead of openWakeWord's")
    parser.add_argument("--passes", type=int, default=PASSES, help="over the corrections of each home")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    arguments = parser.parse_args()
    folder, model = arguments.folder, (arguments.model or published(CLASSIFIER)).read_bytes()
    later = [read(folder, home, "later_") for home in range(len(list(folder.glob("home-*.npz"))))]
    homes = {"fleet": later[:FLEET], "other homes": later[FLEET:]}
    figures: dict[str, object] = {}
    figures |= show("published", [model], homes, PUBLISHED)
    figures |= show(f"published at {TRAINED}", [model], homes, TRAINED)
    data = [corrections(Detector(model), read(folder, home, "")) for home in range(FLEET)]
    for name, local in (("shared", []), ("personal", HEAD)):
        with TemporaryDirectory() as temporary:
            trained = train(
                model, data, Path(temporary), local=local, passes=arguments.passes, rate=arguments.learning_rate
            )
        figures |= show(name, trained.models, homes, TRAINED)
        print(f"{name:16} {trained.cost}")
        figures[f"{name}, cost"] = asdict(trained.cost)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
