"""The dataset of handwritten digits for the demo and the examples, included in the package."""

from pathlib import Path

import numpy as np

from edgeasync.data.dataset import Dataset

BRIGHTEST = 16
"""The largest pixel value in the file."""


def load_digits() -> Dataset:
    """Load 1,797 handwritten digits by 13 writers.

    `x` is float32 (1797, 64): images of 8 x 8 pixels, row by row, with values from 0 to 1. `y` is
    int64 (1797,): the digits, 0 to 9. The order is that of scikit-learn, sorted by writer, so
    shuffle the examples before you split them.

    Source: E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, the test
    set, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0.
    This package stores the dataset as numpy arrays.

    >>> from edgeasync.data import load_digits
    >>> digits = load_digits()
    >>> digits.x.shape, digits.x.max(), digits.y[:4]
    ((1797, 64), np.float32(1.0), array([0, 1, 2, 3]))
    """
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        return Dataset.of(arrays["x"] / np.float32(BRIGHTEST), arrays["y"])
