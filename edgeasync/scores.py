"""Whether what a model returns can be scores: losses of scores need values that are free in range.

A model is run with parameters drawn at random, from small to large. Scores then grow with them. Values that stay
between 0 and 1 are probabilities, however they were made.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""How large parameters are drawn, as multiples of their size: the scores of a new model may all be near 0."""

SIZE_MIN = 0.1
"""The size that parameters which are all 0 are taken to have."""

_SPREAD_MIN = 1e-3
"""Over less than this nothing is told: a model may return a constant on random input."""

_ROUNDING = 1e-6


def drawn(value: Array, scale: float, generator: np.random.Generator) -> Array:
    """Return random values of an array's size in both senses, times a scale."""
    size = max(float(np.linalg.norm(value)) / np.sqrt(max(value.size, 1)), SIZE_MIN)
    return np.asarray(generator.standard_normal(value.shape, np.float32) * np.float32(scale * size))


def are_bounded(runs: Iterable[npt.NDArray[np.floating]]) -> bool:
    """Return whether the values of all runs, but infinite ones, lie between 0 and 1, or all between -1 and 0."""
    finite = [value[np.isfinite(value)] for value in runs]
    told = [value for value in finite if value.size]
    if len(told) < len(SCALES) / 2:
        return False
    low, high = min(float(value.min()) for value in told), max(float(value.max()) for value in told)
    if high - low < _SPREAD_MIN:
        return False
    return (low >= 0 and high <= 1 + _ROUNDING) or (low >= -1 - _ROUNDING and high <= 0)
