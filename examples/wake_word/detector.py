"""Find wake words in recordings, count false alarms and misses, and collect what a home corrects."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from features import session

from edgeasync import Dataset

FRAMES = 16  # embeddings that a classifier reads, 80 ms apart
REST = 25  # frames without a detection, after which the next one counts
HARDEST = 1000  # windows of talk from which a home learns


@dataclass(frozen=True)
class Sounds:
    """Embeddings of minutes of talk (n, 741, 96) and of calls of the wake word (m, 59, 96)."""

    talk: np.ndarray
    calls: np.ndarray


def read(folder: Path, home: int, part: str) -> Sounds:
    with np.load(folder / f"home-{home}.npz") as arrays:
        return Sounds(arrays[f"{part}talk"], arrays[f"{part}calls"])


class Detector:
    """A classifier in an ONNX file that reads one window of 16 embeddings."""

    def __init__(self, model: bytes) -> None:
        self._session = session(model)
        self._input = self._session.get_inputs()[0].name

    def scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Return the score of each window of embeddings (n, frames, 96)."""
        windows = windows_of(embeddings)
        flat = np.ascontiguousarray(windows.reshape(-1, 1, *windows.shape[2:]))
        scores = [np.asarray(self._session.run(None, {self._input: window})[0]).item() for window in flat]
        return np.reshape(scores, windows.shape[:2])


def windows_of(embeddings: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(embeddings, FRAMES, axis=1).swapaxes(2, 3)


@dataclass(frozen=True)
class Found:
    """False alarms in hours of talk, and misses among calls."""

    alarms: int
    hours: float
    misses: int
    calls: int

    def __add__(self, other: "Found") -> "Found":
        return Found(
            self.alarms + other.alarms,
            self.hours + other.hours,
            self.misses + other.misses,
            self.calls + other.calls,
        )

    def __str__(self) -> str:
        return f"{self.alarms_per_hour:6.1f} false alarms an hour, {self.missed_percent:5.1f}% missed"

    @property
    def alarms_per_hour(self) -> float:
        return self.alarms / self.hours

    @property
    def missed_percent(self) -> float:
        return 100.0 * self.misses / self.calls


def measure(detector: Detector, sounds: Sounds, threshold: float) -> Found:
    alarms = sum(len(detections(minute, threshold)) for minute in detector.scores(sounds.talk))
    best = detector.scores(sounds.calls).max(axis=1)
    return Found(alarms, len(sounds.talk) / 60, int((best < threshold).sum()), len(best))


def detections(scores: np.ndarray, threshold: float) -> list[int]:
    """Return the frames at which a detection begins."""
    found: list[int] = []
    last = -REST
    for frame in np.flatnonzero(scores >= threshold):
        if frame - last >= REST:
            found.append(int(frame))
        last = int(frame)
    return found


def corrections(detector: Detector, sounds: Sounds) -> Dataset:
    """Return what a home learns from: its calls, and the talk that sounds most like a call.

    Somebody confirms each call, and repeats it if it was missed: the three windows around the
    highest score get the label 1. The thousand windows of talk with the highest scores get the
    label 0. They contain all false alarms, and talk to which the detector almost answered.
    """
    calls, talk = windows_of(sounds.calls), windows_of(sounds.talk)
    best = np.clip(detector.scores(sounds.calls).argmax(axis=1), 1, calls.shape[1] - 2)
    heard = np.concatenate([calls[np.arange(len(calls)), best + shift] for shift in (-1, 0, 1)])
    hardest = detector.scores(sounds.talk).ravel().argsort()[-HARDEST:]
    x = np.concatenate([heard, talk.reshape(-1, *talk.shape[2:])[hardest]])
    return Dataset.of(x, np.repeat([1.0, 0.0], [len(heard), len(hardest)]))


def tested(models: Sequence[bytes], homes: Sequence[Sounds], threshold: float) -> Found:
    """Return what models find in homes: one model for all, or one for each."""
    several = models if len(models) == len(homes) else [*models] * len(homes)
    found = [measure(Detector(model), home, threshold) for model, home in zip(several, homes, strict=True)]
    return sum(found[1:], start=found[0])
