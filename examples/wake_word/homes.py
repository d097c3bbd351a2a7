"""Homes with people, names that sound like the wake word, a room and its noise."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from voices import ACCENTS, RATE, SPEAKERS, Voice

WAKE_WORD, CALL_S = "Hey Jarvis", 5.5
PEOPLE, CALLED = 3, 2  # people in each home, and names that they call
NAMES = [
    "Charlie", "Janice", "Jarrod", "Chavis", "Jarvin", "Jasper", "Charlotte", "Chavez", "Gervais",
    "Jervis", "Tarvis", "Jarvey", "Jarett", "Charles", "Jordan", "Garvey", "Darvis", "Jarek",
    "Charlene", "Jarlath", "Chandler", "Travis", "Jackie", "Jarmaine",
]  # fmt: skip
WHO = [
    "I", "you", "we", "they", "my sister", "the neighbours", "our teacher", "the dog", "that man",
    "grandmother",
]  # fmt: skip
DOES = [
    "saw", "bought", "forgot", "liked", "carried", "painted", "found", "heard about", "asked for",
    "cannot stand",
]  # fmt: skip
WHAT = [
    "the garden", "a jar of honey", "that service", "the harvest", "two charges", "our chargers",
    "a new jacket", "the car", "some jam", "the news",
]  # fmt: skip
WHEN = [
    "today", "last week", "in the kitchen", "on the way home", "before dinner", "again",
    "at school", "with the others",
]  # fmt: skip
COMMANDS = [
    "what time is it", "turn on the lights", "play some music", "set a timer", "how is the weather",
    "stop",
]  # fmt: skip

Say = Callable[[str, Voice], np.ndarray]


@dataclass(frozen=True)
class Home:
    """A home: its people, the names that they call, echo of the room in seconds, colour and level of its noise."""

    number: int
    voices: list[Voice]
    names: list[str]
    echo_s: float
    colour: float
    noise_db: float


def make_homes(count: int, seed: int) -> list[Home]:
    """Return homes of which no two share a speaker or a name."""
    draw = np.random.default_rng([seed, 1])
    speakers, names = draw.permutation(SPEAKERS), draw.permutation(NAMES)
    homes = []
    for number in range(count):
        own, called = (slice(number * each, (number + 1) * each) for each in (PEOPLE, CALLED))
        voices = [
            Voice(
                str(draw.choice(ACCENTS)), str(speaker), int(draw.integers(110, 165)), int(draw.integers(35, 65)),
                int(draw.integers(30, 70)),
            )
            for speaker in speakers[own]
        ]  # fmt: skip
        echo_s, colour, noise_db = draw.uniform(0.1, 0.4), draw.uniform(0.0, 1.2), draw.uniform(-30.0, -12.0)
        homes.append(Home(number, voices, [str(name) for name in names[called]], echo_s, colour, noise_db))
    return homes


class Room:
    """Sounds as a microphone in a home hears them."""

    def __init__(self, home: Home, say: Say, seed: list[int]) -> None:
        self._home = home
        self._say = say
        self._draw = np.random.default_rng(seed)
        taps = np.arange(int(RATE * home.echo_s))
        self._echo = np.random.default_rng(seed[:2]).normal(size=len(taps)) * 10 ** (-3.0 * taps / len(taps))
        self._echo *= 0.5 / np.sqrt(np.sum(self._echo**2))
        self._echo[0] = 1.0
        self._echo = self._echo.astype(np.float32)

    def call(self) -> np.ndarray:
        """Return a sound with one call of the wake word, of `CALL_S` seconds."""
        words = f"{WAKE_WORD}, {self._draw.choice(COMMANDS)}" if self._draw.random() < 0.5 else WAKE_WORD
        return self._heard([_pause(2.0), self._spoken(words), _pause(CALL_S)], CALL_S)

    def talk(self) -> np.ndarray:
        """Return a minute of talk without the wake word. One sentence in 15 begins with "Hey" and a name."""
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < 60 * RATE:
            words = " ".join(str(self._draw.choice(each)) for each in (WHO, DOES, WHAT, WHEN))
            if self._draw.random() < 1 / 15:
                words = f"Hey {self._draw.choice(self._home.names)}, {words}"
            parts += [self._spoken(words), _pause(self._draw.exponential(0.7))]
        return self._heard(parts, 60.0)

    def _spoken(self, words: str) -> np.ndarray:
        """Return words of somebody, from somewhere in the room."""
        voice = self._home.voices[self._draw.integers(PEOPLE)]
        hurry = self._draw.uniform(0.9, 1.1)
        voice = Voice(voice.accent, voice.speaker, int(voice.speed * hurry), voice.pitch, voice.range)
        return self._say(words, voice) * 10 ** (self._draw.uniform(-10.0, 0.0) / 20)

    def _heard(self, parts: list[np.ndarray], seconds: float) -> np.ndarray:
        sound = np.concatenate(parts)[: int(seconds * RATE)]
        size = 1 << (len(sound) + len(self._echo)).bit_length()  # fast, and without wrapping round
        echoed = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(self._echo, size))[: len(sound)]
        spectrum = np.fft.rfft(self._draw.standard_normal(size, np.float32))
        noise = np.fft.irfft(
            spectrum * np.arange(1, len(spectrum) + 1, dtype=np.float32) ** (-self._home.colour / 2)
        )[: len(sound)]
        noise *= 10 ** (self._home.noise_db / 20) / noise.std()
        return (2000 * (echoed + noise)).astype(np.float32)


def _pause(seconds: float) -> np.ndarray:
    return np.zeros(int(RATE * seconds), np.float32)
