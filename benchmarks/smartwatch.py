"""Sensor windows of a smartwatch: ten people, seven shoulder exercises, both arms.

The recordings come with the package seglearn (Burns et al. 2018, arXiv:1802.01489). They are 140
recordings at 50 Hz, with three axes of acceleration and three of rotation. With one person per
device, the data of a fleet differ by nature.
"""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.training.numpy_models import MlpModel

PEOPLE = 10
WINDOW = 100
"""Samples in an example: two seconds."""

SENSORS = 6
STRIDE = 50
HELD_OUT = 0.25
"""The last part of every recording, which no training window overlaps."""

MODEL = MlpModel(inputs=WINDOW * SENSORS, hidden=(64,), classes=7)


def split_by_person() -> tuple[list[Dataset], Dataset]:
    """Return each person's training windows, and everybody's held-out windows.

    All are standardized by sensor.
    """
    parts, held_out, _ = _split()
    return list(parts), held_out


def split_own() -> list[tuple[Dataset, Dataset]]:
    """Return each person's training windows, and the person's later, held-out windows."""
    parts, held_out, people = _split()
    return [(part, held_out.take(np.flatnonzero(people == person))) for person, part in enumerate(parts)]


@lru_cache
def _split() -> tuple[list[Dataset], Dataset, np.ndarray]:
    """Return each person's training windows, all held-out windows, and whose these are."""
    package = find_spec("seglearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the smartwatch data come with seglearn: pip install 'edgeasync[test]'")
    path = Path(package.origin).with_name("data") / "watch_dataset.npy"
    recorded = np.load(path, allow_pickle=True).item()  # an object array of a package that is installed anyway
    scale = np.concatenate(recorded["X"]).std(axis=0)
    parts: list[tuple[list[np.ndarray], list[int]]] = [([], []) for _ in range(PEOPLE)]
    held: tuple[list[np.ndarray], list[int]] = ([], [])
    people: list[int] = []
    scaled = [(values / scale).astype(np.float32) for values in recorded["X"]]
    for values, label, person in zip(scaled, recorded["y"], recorded["subject"], strict=True):
        border = round((1.0 - HELD_OUT) * len(values))
        for begin, end, (x, y) in ((0, border, parts[person - 1]), (border, len(values), held)):
            for start in range(begin, end - WINDOW + 1, STRIDE):
                x.append(values[start : start + WINDOW].ravel())
                y.append(label)
        people += [person - 1] * (len(held[1]) - len(people))
    return [_dataset(*part) for part in parts], _dataset(*held), np.array(people)


def _dataset(x: list[np.ndarray], y: list[int]) -> Dataset:
    return Dataset.of(np.stack(x), np.array(y, np.int64))
