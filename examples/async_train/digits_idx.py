"""scikit-learn's digits as IDX files, under the names that MNIST's files have."""

import gzip
import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TRAINED = 1400
"""The number of examples for training; the others are for the test."""


def digits(*, size: int = 8) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return images (n, size, size) of bytes and labels, for training and for the test; size is 8 or 28."""
    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    if size == 28:
        images = np.pad(np.kron(images, np.ones((1, 3, 3), np.uint8)), ((0, 0), (2, 2), (2, 2)))
    # In the order of scikit-learn the last ones are of other writers, and harder.
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], data.target.astype(np.uint8)[order]
    return (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])


def write_idx_digits(folder: Path, *, zipped: bool = False, size: int = 8) -> Path:
    """Write the four files of MNIST into a folder, which is made; return it. `zipped` ones end in `.gz`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "t10k"), digits(size=size), strict=True):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return folder
