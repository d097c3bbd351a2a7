"""Spoken words from a small synthesizer: a source, three formants and several voices.

A word is a sequence of vowels between which the formants glide. Features are the logarithms of the
band energies in slices of the word. The model is the source-filter model of Fant 1960, simplified
for a benchmark.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

RATE = 8000
COUNT = 3200
"""Samples of a word: 0.4 seconds."""

GLIDE = 80
"""The formants are computed once per this many samples."""

BANDS, SLICES = 16, 10

VOWELS = {
    "i": (270.0, 2290.0, 3010.0),
    "e": (530.0, 1840.0, 2480.0),
    "a": (730.0, 1090.0, 2440.0),
    "o": (570.0, 840.0, 2410.0),
    "u": (300.0, 870.0, 2240.0),
}
"""The formants of a man's vowels in hertz, after Peterson and Barney 1952."""

WORDS = ("ia", "ai", "ou", "ea", "ua", "ie", "oi", "aue")


@dataclass(frozen=True)
class Voice:
    """A voice: pitch, length of the vocal tract, breath, tempo and accent.

    A tract of length 1 is a man's; a shorter one raises the formants. The accent moves the second
    formant.
    """

    pitch_hz: float
    tract: float
    breath: float
    tempo: float
    accent: float


VOICES = tuple(
    Voice(pitch, tract, breath, tempo, accent)
    for pitch, tract, breath, tempo, accent in (
        (95.0, 1.05, 0.02, 1.0, 1.0), (110.0, 1.0, 0.05, 1.1, 0.95), (120.0, 0.98, 0.02, 0.9, 1.05),
        (140.0, 0.95, 0.1, 1.0, 1.0), (180.0, 0.88, 0.03, 1.2, 0.9), (200.0, 0.85, 0.05, 0.8, 1.0),
        (220.0, 0.84, 0.2, 1.0, 1.1), (240.0, 0.8, 0.05, 1.1, 1.0), (280.0, 0.75, 0.05, 0.9, 0.95),
        (320.0, 0.7, 0.1, 1.0, 1.05),
    )
)  # fmt: skip


def speak(
    voice: Voice, repetitions: int, random: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the features (n, 160) of words that a voice repeats, and the words' numbers."""
    said = [(number, _say(word, voice, random)) for number, word in enumerate(WORDS) for _ in range(repetitions)]
    return np.array([features for _, features in said], np.float32), np.array([number for number, _ in said])


def _say(word: str, voice: Voice, random: np.random.Generator) -> npt.NDArray[np.float32]:
    points = np.linspace(0.0, 1.0, COUNT // GLIDE, dtype=np.float32)
    place = points ** np.float32(voice.tempo * random.uniform(0.85, 1.15)) * (len(word) - 1)
    waver = 1.0 + 0.1 * np.sin(6.0 * points + random.uniform(0, 6))
    pitch_hz = voice.pitch_hz * random.uniform(0.9, 1.1) * waver
    harmonics = np.arange(1, int(RATE / 2 / pitch_hz.max()), dtype=np.float32)[:, None]
    formants = np.array([VOWELS[vowel] for vowel in word]) / voice.tract * (1.0, voice.accent, 1.0)
    formants *= random.normal(1.0, 0.1, formants.shape)
    gain = np.zeros((len(harmonics), len(points)), np.float32)
    for which in range(formants.shape[1]):
        centre_hz = np.interp(place, np.arange(len(word)), formants[:, which])
        gain += 1.0 / (1.0 + ((harmonics * pitch_hz - centre_hz) / (90.0 + 40.0 * which)) ** 2)
    phase = (2.0 * np.pi / RATE * np.cumsum(np.repeat(pitch_hz, GLIDE))).astype(np.float32)
    sound = (np.repeat(gain / harmonics, GLIDE, axis=1) * np.sin(harmonics * phase)).sum(axis=0)
    sound += (voice.breath + 0.05) * sound.std() * random.standard_normal(COUNT, dtype=np.float32)
    return _features(sound, random)


def _features(sound: npt.NDArray[np.float32], random: np.random.Generator) -> npt.NDArray[np.float32]:
    slices = sound.reshape(SLICES, -1) * np.hanning(len(sound) // SLICES)
    energy = np.abs(np.fft.rfft(slices, axis=1)) ** 2
    edges = np.geomspace(4, energy.shape[1], BANDS + 1).astype(int)
    bands = np.array([energy[:, low : max(low + 1, high)].mean(axis=1) for low, high in pairwise(edges)])
    loudness = np.log(bands + 1e-3 * bands.mean())
    even = (loudness - loudness.mean()) / loudness.std()
    features: npt.NDArray[np.float32] = (even.ravel() + random.normal(0.0, 0.05, even.size)).astype(np.float32)
    return features
