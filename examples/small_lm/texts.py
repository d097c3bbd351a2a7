"""Write the texts of four devices as tokens, and the tokenizer.

Run as `python examples/small_lm/texts.py texts`. Each device has a kind of text of its own, which
comes with Python: the language reference, source code, names of characters, and docstrings. The last
fifth of each text is held out as the device's later text. Needs `pip install tokenizers`.
"""

import argparse
import ast
import asyncio
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LATER = 0.2
"""Share of each text that is not trained on, but used to measure."""


def reference() -> str:
    """Return chapters of Python's language reference."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _sources(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        yield file.read_text("utf-8")


def source_code() -> str:
    """Return the source code of `asyncio`."""
    return "\n\n".join(_sources(Path(asyncio.__file__).parent))


def characters() -> str:
    """Return the names of characters, one per line."""
    names = (unicodedata.name(chr(code), "") for code in range(0x20, 0x3000))
    return "\n".join(filter(None, names))


def docstrings() -> str:
    """Return the docstrings of the standard library's modules."""
    sources = _sources(Path(asyncio.__file__).parents[1])
    found = [
        ast.get_docstring(node)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    return "\n\n".join(filter(None, found))


TEXTS: dict[str, Callable[[], str]] = {
    "reference": reference,
    "source-code": source_code,
    "characters": characters,
    "docstrings": docstrings,
}
"""Devices, and the text of each."""


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) on all texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def examples(ids: list[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of `tokens` tokens, int64, and for each token the one that follows it."""
    count = (len(ids) - 1) // tokens
    values = np.array(ids[: count * tokens + 1], np.int64)
    return values[:-1].reshape(count, tokens), values[1:].reshape(count, tokens)


def main() -> None:
    """Write `tokenizer.json`, and `NAME.npz` and `NAME-later.npz` of each device."""
    parser = argparse.ArgumentParser(description="Write the texts of four devices as tokens.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="per example; the model's number")
    parser.add_argument("--characters", type=int, default=240_000, help="of each device's text")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model; by default one is trained")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens of the tokenizer that is trained")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    texts = {name: make()[: arguments.characters] for name, make in TEXTS.items()}
    if arguments.tokenizer is None:
        tokenizer = train_tokenizer([*texts.values()], arguments.vocabulary)
    else:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    for name, text in texts.items():
        x, y = examples(tokenizer.encode(text).ids, arguments.tokens)
        early = round(len(x) * (1 - LATER))
        np.savez(arguments.folder / f"{name}.npz", x=x[:early], y=y[:early])
        np.savez(arguments.folder / f"{name}-later.npz", x=x[early:], y=y[early:])
        print(f"{name}: {early} examples to train on, {len(x) - early} to measure")


if __name__ == "__main__":
    main()
