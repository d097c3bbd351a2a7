"""Data of honest devices that differ by class, sensor, person, voice or amount.

A seed determines each fleet. A device has training data, and at least a hundred held-out examples
of the same kind. So that there are enough digits, each drawn digit is rotated, shifted, scaled and
made noisy in its own way. Training and held-out digits come from different originals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks import smartwatch
from benchmarks.speech import VOICES, WORDS, speak
from benchmarks.virtual_fleet import DIGITS, EXAMPLES_MIN, split_digits
from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import dirichlet, iid
from edgeasync.training.numpy_models import MlpModel

DEVICES = 10
TRAINING = 3000
HELD_OUT = 3000
"""Number of distorted digits in the whole fleet."""

HELD_OUT_MIN = 100
"""Minimum of held-out examples per device."""

SIDE = 8
ALPHA = 0.1

Images = npt.NDArray[np.float32]
Sensor = Callable[[Images, np.random.Generator], Images]
"""Turns images (n, 8, 8) into what a device's sensor sees, with the device's generator."""


@dataclass(frozen=True)
class Part:
    """A device's data. If it has `later`, it trains on that from the middle of a run."""

    training: Dataset
    held_out: Dataset
    later: Dataset | None = None


@dataclass(frozen=True)
class Data:
    """The data of a fleet, and the model that it trains."""

    model: MlpModel
    learning_rate: float
    parts: Sequence[Part]


def distort(images: Images, random: np.random.Generator) -> Images:
    """Rotate, shift and scale each image in its own way (bilinear), and add noise."""
    count = len(images)
    angle, scale = random.normal(0.0, 0.1, count), random.uniform(0.9, 1.1, count)
    shift = random.normal(0.0, 0.3, (count, 2))
    centre = (SIDE - 1) / 2.0
    rows, columns = np.mgrid[:SIDE, :SIDE] - centre
    cosine, sine = (np.cos(angle) / scale)[:, None, None], (np.sin(angle) / scale)[:, None, None]
    y = cosine * rows - sine * columns + centre + shift[:, 0, None, None]
    x = sine * rows + cosine * columns + centre + shift[:, 1, None, None]
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    y, x = np.clip(y, -1.0, SIDE) + 1.0, np.clip(x, -1.0, SIDE) + 1.0
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    down, right = y - top, x - left
    each = np.arange(count)[:, None, None]
    found = (
        padded[each, top, left] * (1 - down) * (1 - right)
        + padded[each, top, left + 1] * (1 - down) * right
        + padded[each, top + 1, left] * down * (1 - right)
        + padded[each, top + 1, left + 1] * down * right
    )
    noisy: Images = (found + random.normal(0.0, 0.05, found.shape)).astype(np.float32)
    return noisy


@lru_cache(maxsize=4)
def _digits(seed: int) -> tuple[Dataset, Dataset]:
    """Return distorted digits for training, and held-out ones."""
    random = np.random.default_rng([seed, 47])

    def draw(originals: Dataset, count: int) -> Dataset:
        chosen = originals.take(random.integers(len(originals), size=count))
        images = distort(chosen.x.reshape(-1, SIDE, SIDE), random)
        return Dataset(images.reshape(count, -1), chosen.y)

    training, held_out = split_digits()
    return draw(training, TRAINING), draw(held_out, HELD_OUT)


def _alike(training: Dataset, held_out: Dataset, random: np.random.Generator) -> Dataset:
    """Return held-out examples with the class shares of the given training data."""
    shares = np.bincount(training.y, minlength=10) / len(training)
    weights = shares[held_out.y] / np.bincount(held_out.y, minlength=10)[held_out.y]
    count = int(
        min(HELD_OUT / DEVICES, *[n / s for n, s in zip(np.bincount(held_out.y), shares, strict=False) if s])
    )
    keys = np.where(weights > 0.0, random.exponential(size=len(weights)) / np.maximum(weights, 1e-12), np.inf)
    return held_out.take(np.argsort(keys)[: max(HELD_OUT_MIN, count)])


def _skewed(parts: Sequence[Dataset], held_out: Dataset, seed: int) -> list[Part]:
    random = np.random.default_rng([seed, 48])
    return [Part(part, _alike(part, held_out, random)) for part in parts]


def _of_digits(parts: list[Part]) -> Data:
    return Data(DIGITS, 0.1, parts)


def label_skew(seed: int) -> Data:
    """Give each device its own mix of classes (Dirichlet 0.1)."""
    training, held_out = _digits(seed)
    parts = dirichlet(training, DEVICES, ALPHA, seed, examples_min=EXAMPLES_MIN)
    return _of_digits(_skewed(parts, held_out, seed))


def one_class(seed: int) -> Data:
    """Give each device a single class."""
    training, held_out = _digits(seed)
    parts = [training.take(np.flatnonzero(training.y == label)) for label in range(DEVICES)]
    return _of_digits(_skewed(parts, held_out, seed))


def even(seed: int, sizes: Sequence[int] = ()) -> Data:
    """Give all devices the same kind of data; `sizes` sets the first devices' examples."""
    training, held_out = _digits(seed)
    rest = np.random.default_rng([seed, 49]).permutation(len(training))
    parts = []
    for size in sizes:
        parts.append(training.take(rest[:size]))
        rest = rest[size:]
    parts += iid(training.take(rest), DEVICES - len(sizes), seed)
    return _of_digits([Part(part, own) for part, own in zip(parts, iid(held_out, DEVICES, seed), strict=True)])


def ten_times(seed: int) -> Data:
    """Give the first device ten times as much data as each other device."""
    return even(seed, (10 * TRAINING // (DEVICES + 9),))


def twenty(seed: int) -> Data:
    """Give the first device twenty examples."""
    return even(seed, (20,))


def _seen(sensors: Sequence[Sensor]) -> Callable[[int], Data]:
    """Return a fleet whose devices have their own sensors."""

    def make(seed: int) -> Data:
        parts = []
        for number, part in enumerate(even(seed).parts):
            random = np.random.default_rng([seed, 50, number])

            def see(data: Dataset, sensor: Sensor = sensors[number], own: np.random.Generator = random) -> Dataset:
                images = sensor(data.x.reshape(-1, SIDE, SIDE), own)
                return Dataset(images.reshape(len(data), -1).astype(np.float32), data.y)

            parts.append(Part(see(part.training), see(part.held_out)))
        return _of_digits(parts)

    return make


def _same(images: Images, random: np.random.Generator) -> Images:  # noqa: ARG001
    return images


def _times(factor: float) -> Sensor:
    return lambda images, random: images * np.float32(factor)  # noqa: ARG005


def _plus(offset: float) -> Sensor:
    return lambda images, random: images + np.float32(offset)  # noqa: ARG005


def _mirror(images: Images, random: np.random.Generator) -> Images:  # noqa: ARG001
    return images[:, :, ::-1]


def _coarse(images: Images, random: np.random.Generator) -> Images:
    """Halve the resolution, invert, and add noise."""
    coarse = images.reshape(-1, SIDE // 2, 2, SIDE // 2, 2).mean(axis=(2, 4))
    seen: Images = 1.0 - coarse.repeat(2, axis=1).repeat(2, axis=2) + random.normal(0.0, 0.1, images.shape)
    return seen


GAINS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.0, 1.4, 2.0, 3.0, 4.0)
OFFSETS = (-1.0, -0.7, -0.5, -0.2, 0.0, 0.0, 0.2, 0.5, 0.7, 1.0)


def changes(seed: int) -> Data:
    """Change the first device's classes half-way: the last five instead of the first."""
    data = even(seed)
    first = data.parts[0]
    held_out = _digits(seed)[1]
    half = [first.training.take(np.flatnonzero((first.training.y >= 5) == late)) for late in (False, True)]
    own = _alike(half[1], held_out, np.random.default_rng([seed, 51]))
    return Data(data.model, data.learning_rate, [Part(half[0], own, half[1]), *data.parts[1:]])


def people(seed: int) -> Data:  # noqa: ARG001
    """Give each device the smartwatch data of one person."""
    return Data(smartwatch.MODEL, 0.05, [Part(*own) for own in smartwatch.split_own()])


def voices(seed: int) -> Data:
    """Give each device some words, spoken repeatedly by one voice."""
    parts = []
    for number, (x, y) in enumerate(_spoken()):
        said = Dataset.of(x, y)
        order = np.random.default_rng([seed, 52, number]).permutation(len(said))
        held = round(0.4 * len(said))
        parts.append(Part(said.take(order[held:]), said.take(order[:held])))
    return Data(MlpModel(inputs=parts[0].training.x.shape[1], hidden=(64,), classes=len(WORDS)), 0.05, parts)


@lru_cache
def _spoken() -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    """Return the examples of each voice, the same for all seeds."""
    random = np.random.default_rng(53)
    return [speak(voice, 40, random) for voice in VOICES]


MAKERS: dict[str, Callable[[int], Data]] = {
    "even": even,
    "Dirichlet 0.1": label_skew,
    "one class each": one_class,
    "gain": _seen([_times(gain) for gain in GAINS]),
    "offset": _seen([_plus(offset) for offset in OFFSETS]),
    "mirrored": _seen([_mirror, *[_same] * 9]),
    "other sensor": _seen([_coarse, *[_same] * 9]),
    "smartwatch": people,
    "speech": voices,
    "ten times the data": ten_times,
    "twenty examples": twenty,
    "changing data": changes,
}
