"""Texts of four devices, all from Python's standard library, and their tokens.

Each device's text is cut in two: it trains on the earlier part, and is evaluated on the later one.
The tokenizer is a file in the format of Hugging Face's `tokenizers`. Without a file, `tokenizer`
learns byte pairs from all earlier parts.
"""

import asyncio
import email
import random
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EARLIER = 0.8
"""The share of a text on which its device trains."""

CHARACTERS = 200_000
"""Characters per text."""


class Tokens(NamedTuple):
    """Examples: `x` has the tokens and `y` the next ones, both int64 of (examples, tokens)."""

    x: np.ndarray
    y: np.ndarray


def _reference() -> str:
    return "\n".join(topics.values())


def _sources(*packages: ModuleType) -> str:
    files = [path for package in packages for path in sorted(Path(package.__path__[0]).glob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def _code() -> str:
    return _sources(asyncio, email)


def _names() -> str:
    """Return lines such as `Á LATIN CAPITAL LETTER A WITH ACUTE`."""
    named = ((chr(code), unicodedata.name(chr(code), "")) for code in range(0x20, 0x2F00))
    return "\n".join(f"{character} {name}" for character, name in named if name)


def _log() -> str:
    """Return a made-up log of a heating system."""
    generator, lines = random.Random(0), list[str]()
    temperature, pressure = 21.0, 1.5
    for minute in range(6_000):
        temperature += generator.gauss((21.0 - temperature) * 0.1, 0.2)
        pressure += generator.gauss((1.5 - pressure) * 0.05, 0.01)
        state = "burner on" if temperature < 20.8 else "burner off"
        time = f"day {minute // 1440} {minute // 60 % 24:02}:{minute % 60:02}"
        lines.append(f"{time} room {temperature:.1f} degrees, circuit {pressure:.2f} bar, {state}")
    return "\n".join(lines)


TEXTS: Mapping[str, Callable[[], str]] = {"reference": _reference, "code": _code, "names": _names, "log": _log}
"""Device -> its text."""


def parts(name: str) -> tuple[str, str]:
    """Return the earlier and the later part of a device's text."""
    text = TEXTS[name]()[:CHARACTERS]
    cut = int(EARLIER * len(text))
    return text[:cut], text[cut:]


def learn_tokenizer(vocabulary: int, texts: Iterable[str]) -> Tokenizer:
    """Learn byte pairs from texts (Sennrich et al. 2016, arXiv:1508.07909)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, text: str, length: int) -> Tokens:
    """Cut a text's tokens into examples of `length` tokens. Each is followed by its next token."""
    ids = np.array(tokenizer.encode(text).ids, np.int64)
    count = (len(ids) - 1) // length
    return Tokens(*[ids[start : start + count * length].reshape(count, length) for start in (0, 1)])
