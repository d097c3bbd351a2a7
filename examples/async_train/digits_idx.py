"""Write the handwritten digits as IDX files with MNIST's names: `python digits_idx.py [FOLDER]`."""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np

from edgeasync.data import load_digits

TRAINED = 1400
"""Number of training examples; the rest is the test set."""


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return uint8 images (n, 8, 8) and their labels, for training and for the test."""
    found = load_digits()
    images = np.round(found.x * 255).astype(np.uint8).reshape(-1, 8, 8)
    # The digits are sorted by writer, and the last writers are harder to read.
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], found.y.astype(np.uint8)[order]
    return (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])


def write_idx_digits(folder: Path, *, zipped: bool = False) -> Path:
    """Write MNIST's four files to a folder, created if missing, and return it. `zipped` adds `.gz`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "t10k"), digits(), strict=True):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return folder


if __name__ == "__main__":
    write_idx_digits(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
