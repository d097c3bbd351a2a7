"""Detects whether a model outputs scores, which are unbounded, or probabilities.

The model is run with random parameters of increasing size. Scores grow with the parameters, whereas
probabilities stay between 0 and 1.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""Sizes of the random parameters, relative to those of the model. Several sizes are tried, because
the scores of a new model may all be near 0.
"""

SIZE_MIN = 0.1
"""Root mean square that is assumed for parameters that are all 0."""

_SPREAD_MIN = 1e-3
"""Outputs with a smaller range are not classified, because a model may return a constant on random input."""

_ROUNDING = 1e-6


def drawn(value: Array, scale: float, generator: np.random.Generator) -> Array:
    """Return random normal values with the shape of `value`, and `scale` times its root mean square."""
    size = max(float(np.linalg.norm(value)) / np.sqrt(max(value.size, 1)), SIZE_MIN)
    return np.asarray(generator.standard_normal(value.shape, np.float32) * np.float32(scale * size))


def are_bounded(runs: Iterable[npt.NDArray[np.floating]]) -> bool:
    """Return whether all finite values lie between 0 and 1, or all between -1 and 0.

    Return false if too few runs have finite values, or if the values are almost equal.
    """
    finite = [value[np.isfinite(value)] for value in runs]
    told = [value for value in finite if value.size]
    if len(told) < len(SCALES) / 2:
        return False
    low, high = min(float(value.min()) for value in told), max(float(value.max()) for value in told)
    if high - low < _SPREAD_MIN:
        return False
    return (low >= 0 and high <= 1 + _ROUNDING) or (low >= -1 - _ROUNDING and high <= 0)
