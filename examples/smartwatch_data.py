"""Load smartwatch recordings of ten people who do seven shoulder exercises, as windows.

The watch records three accelerations and three rotations at 50 Hz (Burns et al. 2018, arXiv:1802.01489). The
package seglearn contains the recordings.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from edgeasync import Dataset

PEOPLE = range(1, 11)
SCALE = np.array([0.9, 0.5, 0.54, 1.0, 2.5, 1.05], np.float32)[:, None]  # scale of each sensor


def windows(person: int, begin: float = 0.0, end: float = 1.0) -> Dataset:
    """Return windows of four seconds, one second apart, of a person's recordings or of a part of each."""
    package = find_spec("seglearn")
    if package is None or package.origin is None:
        raise SystemExit("the recordings come with seglearn: pip install seglearn")
    recorded = np.load(Path(package.origin).with_name("data") / "watch_dataset.npy", allow_pickle=True).item()
    x, y = [], []
    for values, label, who in zip(recorded["X"], recorded["y"], recorded["subject"], strict=True):
        part = values[round(begin * len(values)) : round(end * len(values)) : 2].T / SCALE  # downsample to 25 Hz
        for start in range(0, part.shape[1] - 99, 25) if who == person else ():
            x.append(part[:, start : start + 100])
            y.append(label)
    return Dataset.of(np.array(x), np.array(y))


def augmented(data: Dataset, seed: int) -> Dataset:
    """Add three copies of each window, with the watch rotated slightly and the movement scaled."""
    draw, count = np.random.default_rng(seed), 3 * len(data)
    axis = draw.normal(size=(count, 3))
    k = np.cross(np.eye(3), (axis / np.linalg.norm(axis, axis=1, keepdims=True))[:, None])
    angle = draw.normal(0, 0.2, (count, 1, 1))
    turn = (np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * k @ k) * draw.normal(1, 0.1, (count, 1, 1))
    x = np.tile(data.x * SCALE, (3, 1, 1))
    turned = np.concatenate([turn @ x[:, :3], turn @ x[:, 3:]], axis=1) / SCALE
    return joined([data, Dataset.of(turned, np.tile(data.y, 3))])


def joined(parts: list[Dataset]) -> Dataset:
    return Dataset.of(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
