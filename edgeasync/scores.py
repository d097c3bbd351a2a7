"""Detects models that return probabilities instead of raw scores.

Losses such as cross-entropy need raw, unbounded scores. The test runs a model with random
parameters of growing size. Raw scores then grow too. Values that stay between 0 and 1 are
probabilities.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""Scales of the random parameters, relative to the model's. A new model's scores may be near 0."""

SIZE_MIN = 0.1
"""Minimum size to assume, for parameters that are all 0."""

_SPREAD_MIN = 1e-3
"""Minimum range of the values for a decision. A model may return a constant on random input."""

_ROUNDING = 1e-6


def drawn(value: Array, scale: float, generator: np.random.Generator) -> Array:
    """Return normal random values with the array's shape and `scale` times its RMS."""
    size = max(float(np.linalg.norm(value)) / np.sqrt(max(value.size, 1)), SIZE_MIN)
    return np.asarray(generator.standard_normal(value.shape, np.float32) * np.float32(scale * size))


def are_bounded(runs: Iterable[npt.NDArray[np.floating]]) -> bool:
    """Return whether all finite values of all runs are from 0 to 1, or all from -1 to 0."""
    finite = [value[np.isfinite(value)] for value in runs]
    told = [value for value in finite if value.size]
    if len(told) < len(SCALES) / 2:
        return False
    low, high = min(float(value.min()) for value in told), max(float(value.max()) for value in told)
    if high - low < _SPREAD_MIN:
        return False
    return (low >= 0 and high <= 1 + _ROUNDING) or (low >= -1 - _ROUNDING and high <= 0)
