"""Share all layers but the last among ten people with a smartwatch; each device keeps its own last layer.

    python personal_heads.py --passes 60

Each device is then evaluated on its person's later recordings, and compared with one model for all.
"""

import argparse
import time
from contextlib import ExitStack

import numpy as np
from smartwatch_data import PEOPLE, windows

from edgeasync import Agent, Dataset, Hub
from edgeasync.training.numpy_models import MlpModel

HEAD = ["layer1.*"]


def flat(data: Dataset) -> Dataset:
    return Dataset.of(data.x.reshape(len(data), -1), data.y)


def accuracies(local: list[str], passes: int) -> np.ndarray:
    """Train a fleet, and return each device's accuracy on the later windows of its person."""
    model = MlpModel(inputs=600, hidden=(64,), classes=7)
    hub = Hub(model, local=local, run=f"runs/heads-{len(local)}", bind="tcp://127.0.0.1:*")
    with hub, ExitStack() as stack:
        agents = [
            stack.enter_context(
                Agent(hub.address, flat(windows(who, 0.0, 0.75)), name=f"person-{who}", epochs=1, seed=who)
            )
            for who in PEOPLE
        ]
        while min(agent.updates_answered for agent in agents) < passes:
            time.sleep(0.01)
        later = [flat(windows(who, 0.75, 1.0)) for who in PEOPLE]
        return np.array([agent.evaluate(data).accuracy for agent, data in zip(agents, later, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train personal heads.")
    parser.add_argument("--passes", type=int, default=60, help="over the data of each device")
    passes = parser.parse_args().passes
    for name, local in (("one model for all", []), ("personal heads", HEAD)):
        found = accuracies(local, passes)
        print(f"{name}: mean accuracy {found.mean():.1%}, of the person it serves worst {found.min():.1%}")


if __name__ == "__main__":
    main()
