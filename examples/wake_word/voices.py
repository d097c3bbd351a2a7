"""Speak text with espeak-ng, from the wheel espeakng-loader."""

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

RATE = 16_000  # Hz, of all sounds in this example
SPEED, PITCH, RANGE = 1, 3, 4  # numbers of espeak-ng's parameters
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

ACCENTS = ("en", "en-US", "en-GB-scotland", "en-US-nyc", "en-GB-x-rp", "en-GB-x-gbclan")
SPEAKERS = [
    "f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "klatt", "klatt2",
    "klatt4", "Alex", "Andy", "Annie", "Denis", "Diogo", "Henrique", "Hugo", "Jacky", "Mario",
    "Michael", "Mike", "Nguyen", "Reed", "benjamin", "caleb", "david", "edward", "grandma",
    "miguel", "quincy", "rob", "sandro", "steph", "steph2",
]  # fmt: skip


@dataclass(frozen=True)
class Voice:
    """A voice of espeak-ng: an accent, a speaker, words a minute, pitch and its range (0 to 99)."""

    accent: str
    speaker: str
    speed: int
    pitch: int
    range: int


class Espeak:
    """The synthesizer. espeak-ng has one state per process, so make one object."""

    def __init__(self) -> None:
        package = find_spec("espeakng_loader")
        if package is None or package.origin is None:
            raise SystemExit("espeak-ng is missing: pip install --no-deps -r examples/wake_word/requirements.txt")
        folder = Path(package.origin).parent
        self._library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        self._rate = self._library.espeak_Initialize(2, 0, str(folder / "espeak-ng-data").encode(), 0)
        self._parts: list[np.ndarray] = []
        self._callback = CALLBACK(self._keep)  # espeak-ng keeps only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def _keep(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, words: str, voice: Voice) -> np.ndarray:
        """Return the sound of `words`, of the power 1."""
        name = f"gmw/{voice.accent}+{voice.speaker}"
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise SystemExit(f"espeak-ng has no voice {name}")
        for number, value in ((SPEED, voice.speed), (PITCH, voice.pitch), (RANGE, voice.range)):
            self._library.espeak_SetParameter(number, value, 0)
        text = words.encode()
        self._parts = []
        self._library.espeak_Synth(text, len(text) + 1, 0, 1, 0, 1, None, None)
        sound = np.concatenate(self._parts).astype(np.float32)
        sound = np.pad(sound, (0, -len(sound) % 441))  # a length with small factors, for a fast transform
        count = len(sound) * RATE // self._rate
        sound = np.fft.irfft(np.fft.rfft(sound)[: count // 2 + 1], count).astype(np.float32)
        return np.asarray(sound / np.sqrt(np.mean(sound**2)))
