"""Write your own trainer: predict a sensor's next reading from its last four by linear regression.

    python own_trainer.py --updates 300

edgeasync calls a trainer's `spec`, `begin` and `step`. The trainer chooses its data, loss and optimizer.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import edgeasync
from edgeasync import Parameter, ParameterSpec, StepResult, Vector

WINDOW, BATCH, LEARNING_RATE = 4, 32, 0.05
INITIAL = {"weight": np.zeros(WINDOW), "bias": np.zeros(1)}
SPEC = ParameterSpec((Parameter("weight", (WINDOW,)), Parameter("bias", (1,))))
TRUTH = {"weight": [0.0, 0.0, -0.6, 1.2], "bias": [0.3]}


def readings(seed: int) -> Iterator[float]:
    """Simulate a sensor: yield a value that oscillates around 0.75, with noise."""
    generator = np.random.default_rng(seed)
    noise = generator.uniform(0.2, 0.6)
    before, last = 0.75, 0.75
    while True:
        before, last = last, 0.3 + 1.2 * last - 0.6 * before + noise * generator.standard_normal()
        yield last


class Forecast:
    """Train on windows of readings by gradient descent on the squared error."""

    def __init__(self, sensor: Iterator[float]) -> None:
        self.spec = SPEC
        self._sensor = sensor

    def begin(self, parameters: Vector) -> None:
        """Keep named views of the hub's newest model, to train it in place."""
        arrays = SPEC.views(parameters)
        self._weight, self._bias = arrays["weight"], arrays["bias"]

    def step(self) -> StepResult:
        values = np.fromiter(self._sensor, np.float32, BATCH + WINDOW)
        windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)[:-1]
        error = windows @ self._weight + self._bias - values[WINDOW:]
        self._weight -= LEARNING_RATE * (windows.T @ error) / BATCH
        self._bias -= LEARNING_RATE * error.mean()
        return StepResult(loss=float(error @ error) / BATCH, examples=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a forecast of sensor readings.")
    parser.add_argument("--run", type=Path, default=Path("runs/forecast"), help="where the model is kept")
    parser.add_argument("--updates", type=int, default=300, help="train until this number of updates is applied")
    parser.add_argument("--seed", type=int, default=0, help="of the made readings")
    arguments = parser.parse_args()

    trainers = [Forecast(readings(arguments.seed + number)) for number in range(3)]
    until = edgeasync.Stop(updates=arguments.updates)
    for name, array in edgeasync.train(INITIAL, trainers, run=arguments.run, until=until).arrays.items():
        print(f"{name:6} {np.array2string(array, precision=3, suppress_small=True)}, the truth is {TRUTH[name]}")


if __name__ == "__main__":
    main()
