"""Fine-tune openWakeWord's "hey Jarvis" on the corrections of eight homes; their sounds stay in the homes.

    python wake_word.py FOLDER

FOLDER contains recordings from record.py. The first eight homes train, and their later recordings test the
models. All other homes only test the shared model.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from detector import Detector, Found, corrections, read, tested
from features import published

from edgeasync import SGD, Agent, Dataset, Hub
from edgeasync.autodiff.export import export_model

CLASSIFIER = "hey_jarvis_v0.1"
HEAD = ["*.7.*"]  # the last layers of the network and of its verifier
FLEET = 8  # homes that train
PASSES, LEARNING_RATE = 20, 0.02  # chosen on homes of another seed


@dataclass(frozen=True)
class Trained:
    """The trained models, one for all homes or one for each, and what the training cost a home."""

    models: list[bytes]
    seconds: float
    megabytes: float
    step_s: float


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
        batch_size=32,
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
    sent = np.mean([device["bytes_up"] + device["bytes_down"] for device in devices])
    step_s = np.median([device["step_s"] for device in devices])
    return Trained([export_model(model, each) for each in arrays], seconds, float(sent) / 1e6, float(step_s))


def arrays_of(agent: Agent) -> dict[str, np.ndarray]:
    """Return the arrays of an agent's model, with those that it keeps to itself."""
    found: dict[str, np.ndarray] = {}

    def keep(arrays: dict[str, np.ndarray]) -> float:
        found.update({name: array.copy() for name, array in arrays.items()})
        return 0.0

    agent.evaluate(keep)
    return found


def show(model: str, homes: str, found: Found) -> None:
    alarms, missed = found.alarms / found.hours, found.misses / found.calls
    print(f"{model:10} {homes:12} {alarms:6.1f} false alarms an hour, {missed:6.1%} missed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a wake word on the corrections of homes.")
    parser.add_argument("folder", type=Path, help="with the recordings that record.py made")
    parser.add_argument("--model", type=Path, help="a classifier to use instead of openWakeWord's")
    parser.add_argument("--passes", type=int, default=PASSES, help="over the corrections of each home")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    arguments = parser.parse_args()
    folder, model = arguments.folder, (arguments.model or published(CLASSIFIER)).read_bytes()
    later = [read(folder, home, "later_") for home in range(len(list(folder.glob("home-*.npz"))))]
    fleet, others = later[:FLEET], later[FLEET:]
    show("published", "fleet", tested([model], fleet))
    show("published", "other homes", tested([model], others))
    homes = [corrections(Detector(model), read(folder, home, ""), seed=home) for home in range(FLEET)]
    for name, local in (("shared", []), ("personal", HEAD)):
        with TemporaryDirectory() as temporary:
            trained = train(
                model, homes, Path(temporary), local=local, passes=arguments.passes, rate=arguments.learning_rate
            )
        show(name, "fleet", tested(trained.models, fleet))
        if not local:
            show(name, "other homes", tested(trained.models, others))
        step_ms, sent = trained.step_s * 1e3, trained.megabytes
        print(f"{name:10} {step_ms:.1f} ms a step, {sent:.1f} MB a home, {trained.seconds:.0f} s in all")


if __name__ == "__main__":
    main()
