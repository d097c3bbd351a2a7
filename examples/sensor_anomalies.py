"""Train three pumps together on healthy vibrations, then detect faults in each pump's stream.

    python sensor_anomalies.py --epochs 30

A GRU autoencoder reconstructs windows of readings. A large error signals a fault.
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import numpy as np
import onnxruntime

from edgeasync import SGD, Dataset, Stop, nn, train

WINDOW, HIDDEN = 32, 16
FAULTS = {"stuck": 300, "knocking": 600, "drift": 900}

network = nn.Sequential(
    nn.GRU(2, HIDDEN),  # encode a window in its last state ...
    nn.Linear(HIDDEN, 6),  # ... and compress that to six numbers
    nn.Linear(6, WINDOW * HIDDEN),
    nn.Reshape(WINDOW, HIDDEN),
    nn.GRU(HIDDEN, HIDDEN, return_sequences=True),
    nn.Linear(HIDDEN, 2),
)


def stream(pump: int, *, faulty: bool = False) -> Iterator[np.ndarray]:
    """Yield consecutive windows of two vibrations without end; each fault affects one window."""
    generator = np.random.default_rng(pump)
    speed, time = 0.3 + 0.02 * pump, np.arange(WINDOW)
    for number in range(10**9):
        phase = speed * (number * WINDOW + time)
        x = np.stack([np.sin(phase), 0.5 * np.sin(2 * phase + 1)], axis=1)
        x += 0.05 * generator.standard_normal(x.shape)
        if faulty and number == FAULTS["stuck"]:
            x[8:, 0] = x[8, 0]
        if faulty and number == FAULTS["knocking"]:
            x[::4, 1] += 1.0
        if faulty and number == FAULTS["drift"]:
            x += np.linspace(0, 1, WINDOW)[:, None]
        yield x.astype(np.float32)


parser = argparse.ArgumentParser(description="Find faults in streams of sensors.")
parser.add_argument("--epochs", type=int, default=30, help="passes over the healthy windows")
epochs = parser.parse_args().epochs

healthy = [np.stack([*islice(stream(pump), 1000)]) for pump in range(3)]
run = train(
    network,
    [Dataset.of(x, x) for x in healthy],
    loss="mse",
    optimizer=SGD(learning_rate=0.1),
    until=Stop(epochs=epochs),
)
session = onnxruntime.InferenceSession(run.export("pump.onnx"))


def errors(windows: np.ndarray) -> np.ndarray:
    """Return the mean squared reconstruction error of each window."""
    (given_back,) = session.run(None, {"x": windows})
    return np.asarray(((np.asarray(given_back) - windows) ** 2).mean(axis=(1, 2)))


for pump, x in enumerate(healthy):
    alarm_above = 1.5 * errors(x).max()
    found = errors(np.stack([*islice(stream(pump, faulty=True), 1200)])) > alarm_above
    print(f"pump {pump}: alarms in windows {np.flatnonzero(found).tolist()}, faults in {[*FAULTS.values()]}")
