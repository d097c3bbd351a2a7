"""Write a simulated sensor's readings: windows of four, each with the reading that follows."""

import argparse
from pathlib import Path

import numpy as np

WINDOW = 4


def readings(seed: int, count: int) -> np.ndarray:
    """Return values that oscillate around 0.75, with noise."""
    generator = np.random.default_rng(seed)
    values = [0.75, 0.75]
    while len(values) < count:
        values.append(0.3 + 1.2 * values[-1] - 0.6 * values[-2] + 0.4 * generator.standard_normal())
    return np.array(values, np.float32)


def windows(seed: int, count: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of readings, and the reading that follows each."""
    values = readings(seed, count + WINDOW)
    return np.lib.stride_tricks.sliding_window_view(values, WINDOW)[:-1].copy(), values[WINDOW:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the readings of a made sensor.")
    parser.add_argument("file", type=Path, help="such as readings.npz")
    parser.add_argument("--seed", type=int, default=0, help="each sensor needs its own")
    arguments = parser.parse_args()
    x, y = windows(arguments.seed)
    np.savez(arguments.file, x=x, y=y)


if __name__ == "__main__":
    main()
