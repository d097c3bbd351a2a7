"""A model of your own: forecast a sensor's next reading from its last four, by linear regression.

    python own_trainer.py                                   three sensors in this process
    python own_trainer.py hub --bind tcp://127.0.0.1:5555   a hub ...
    python own_trainer.py --hub tcp://127.0.0.1:5555        ... and, in other terminals, sensors

What edgeasync asks of a trainer is `spec`, `begin` and `step`. Data, loss and optimizer are the trainer's own.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

import edgeasync
from edgeasync import Parameter, ParameterSpec, StepResult, Vector
from edgeasync.sdk import events

WINDOW, BATCH, LEARNING_RATE = 4, 32, 0.05
INITIAL = {"weight": np.zeros(WINDOW), "bias": np.zeros(1)}
SPEC = ParameterSpec((Parameter("weight", (WINDOW,)), Parameter("bias", (1,))))
TRUTH = {"weight": [0.0, 0.0, -0.6, 1.2], "bias": [0.3]}


def readings(seed: int) -> Iterator[float]:
    """Stand for a sensor: a value that swings about 0.75 and is pushed about by noise."""
    generator = np.random.default_rng(seed)
    noise = generator.uniform(0.2, 0.6)
    before, last = 0.75, 0.75
    while True:
        before, last = last, 0.3 + 1.2 * last - 0.6 * before + noise * generator.standard_normal()
        yield last


class Forecast:
    """The trainer: windows of readings in, a step of gradient descent on the squared error."""

    def __init__(self, sensor: Iterator[float]) -> None:
        self.spec = SPEC
        self._sensor = sensor

    def begin(self, parameters: Vector) -> None:
        """The hub's newest model: named views of it, to be trained in place."""
        arrays = SPEC.views(parameters)
        self._weight, self._bias = arrays["weight"], arrays["bias"]

    def step(self) -> StepResult:
        values = np.fromiter(self._sensor, np.float32, BATCH + WINDOW)
        windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)[:-1]
        error = windows @ self._weight + self._bias - values[WINDOW:]
        self._weight -= LEARNING_RATE * (windows.T @ error) / BATCH
        self._bias -= LEARNING_RATE * error.mean()
        return StepResult(loss=float(error @ error) / BATCH, examples=BATCH)


def show(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        print(f"{name:6} {np.array2string(array, precision=3, suppress_small=True)}, the truth is {TRUTH[name]}")


def here(run: Path, updates: int, seed: int) -> None:
    """Three sensors and a hub in this process."""
    trainers = [Forecast(readings(seed + number)) for number in range(3)]
    trained = edgeasync.train(INITIAL, trainers, run=run, until=edgeasync.Stop(updates=updates))
    show(trained.arrays)


class Printed:
    """Prints who comes and goes, and the end."""

    def on_join(self, event: events.Join) -> None:
        print("joined", event.device, flush=True)

    def on_leave(self, event: events.Leave) -> None:
        print("left", event.device, event.detail, flush=True)

    def on_end(self, event: events.End) -> None:
        print(event.reason, flush=True)


def hub(bind: str, run: Path, updates: int) -> None:
    """A hub for sensors in other processes or on other machines."""
    until = edgeasync.Stop(updates=updates)
    with edgeasync.Hub(INITIAL, bind=bind, run=run, until=until, callbacks=[Printed()]) as the_hub:
        print("listening", the_hub.address, flush=True)
        the_hub.wait()
    show(edgeasync.Run.open(run).arrays)


def sensor(address: str, device_id: str, state: Path, seed: int) -> None:
    """One sensor; the folder `state` remembers who it is from one start to the next."""
    trainer = Forecast(readings(seed))
    with edgeasync.Agent(address, trainer=trainer, name=device_id, state=state) as agent:
        print(agent.wait())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a forecast of sensor readings.")
    parser.add_argument("role", nargs="?", choices=["hub"], help="be the hub")
    parser.add_argument("--hub", metavar="ADDRESS", help="be one sensor for the hub at this address")
    parser.add_argument("--bind", default="tcp://127.0.0.1:5555", help="where the hub listens")
    parser.add_argument("--run", type=Path, default=Path("runs/forecast"), help="where the model is kept")
    parser.add_argument("--updates", type=int, default=300, help="train until this number of updates is applied")
    parser.add_argument("--device-id", default="sensor-1", help="the sensor's name; each needs its own")
    parser.add_argument("--seed", type=int, default=0, help="of the made readings")
    arguments = parser.parse_args()
    if arguments.role == "hub":
        hub(arguments.bind, arguments.run, arguments.updates)
    elif arguments.hub:
        state = arguments.run / arguments.device_id
        sensor(arguments.hub, arguments.device_id, state, arguments.seed)
    else:
        here(arguments.run, arguments.updates, arguments.seed)


if __name__ == "__main__":
    main()
