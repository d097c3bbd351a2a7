"""Splits a dataset among simulated devices, either at random or with skewed label frequencies."""

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, DataError


def iid(dataset: Dataset, parts: int, seed: int) -> list[Dataset]:
    """Split the examples at random into parts whose sizes differ by at most one.

    Raises `ConfigError` if `parts` is below 1, and `DataError` if there are more parts than
    examples.

    >>> import numpy as np
    >>> from edgeasync.data import Dataset, iid
    >>> [len(part) for part in iid(Dataset.of(np.eye(10), range(10)), 3, seed=0)]
    [4, 3, 3]
    """
    _check(dataset, parts, 1)
    generator = np.random.Generator(np.random.PCG64(seed))
    return [dataset.take(indices) for indices in np.array_split(generator.permutation(len(dataset)), parts)]


def dirichlet(dataset: Dataset, parts: int, alpha: float, seed: int, *, examples_min: int = 1) -> list[Dataset]:
    """Split the examples into parts with skewed label frequencies.

    Every example is in exactly one part. For each class, the fraction that each part receives is
    drawn from Dirichlet(`alpha`). If `alpha` is near 0, a single part receives nearly all examples
    of a class. If `alpha` is large, the classes are split evenly. The skew follows Hsu et al. 2019
    (arXiv:1909.06335). As in Yurochkin et al. 2019 (arXiv:1905.12022), there is one draw per class
    instead of one per part. So no example is left over, but the parts also differ in size. Parts
    with fewer than `examples_min` examples receive random examples from the largest parts.

    Raises `ConfigError` if an argument is out of range, and `DataError` if there are too few
    examples.

    >>> import numpy as np
    >>> from edgeasync.data import Dataset, dirichlet
    >>> data = Dataset.of(np.ones((100, 2)), np.arange(100) % 2)
    >>> parts = dirichlet(data, 4, alpha=0.5, seed=0, examples_min=5)
    >>> sum(len(part) for part in parts)
    100
    """
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha is {alpha}; pass a finite number above 0")
    _check(dataset, parts, examples_min)
    generator = np.random.Generator(np.random.PCG64(seed))
    shares: list[list[int]] = [[] for _ in range(parts)]
    if dataset.y.ndim != 1:
        raise DataError(
            f"the targets have {dataset.y.ndim} dimensions; a skewed split needs one label per example"
        )
    for label in np.unique(dataset.y):
        indices = generator.permutation(np.flatnonzero(dataset.y == label))
        ends = np.cumsum(generator.dirichlet(np.full(parts, alpha)))[:-1] * len(indices)
        for share, piece in zip(shares, np.split(indices, ends.astype(np.int64)), strict=True):
            share.extend(piece.tolist())
    # Shuffle, so that a large part does not give away only its last class.
    shares = [generator.permutation(np.array(share, np.int64)).tolist() for share in shares]
    for share in shares:
        while len(share) < examples_min:
            share.append(max(shares, key=len).pop())
    return [dataset.take(np.array(share, np.int64)) for share in shares]


def _check(dataset: Dataset, parts: int, examples_min: int) -> None:
    if parts < 1:
        raise ConfigError(f"parts is {parts}; pass 1 or more")
    if examples_min < 0:
        raise ConfigError(f"examples_min is {examples_min}; pass 0 or more")
    if len(dataset) < parts * examples_min:
        raise DataError(
            f"{len(dataset)} examples are too few for {parts} parts of at least {examples_min}; use fewer parts"
        )
