"""Splits a dataset among simulated devices: evenly at random, or with skewed labels."""

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, DataError


def iid(dataset: Dataset, parts: int, seed: int) -> list[Dataset]:
    """Split examples evenly at random. Sizes of the parts differ by at most one.

    Raises `ConfigError` for fewer than one part, `DataError` for more parts than examples.

    >>> import numpy as np
    >>> from edgeasync.data import Dataset, iid
    >>> [len(part) for part in iid(Dataset.of(np.eye(10), range(10)), 3, seed=0)]
    [4, 3, 3]
    """
    _check(dataset, parts, 1)
    generator = np.random.Generator(np.random.PCG64(seed))
    return [dataset.take(indices) for indices in np.array_split(generator.permutation(len(dataset)), parts)]


def dirichlet(dataset: Dataset, parts: int, alpha: float, seed: int, *, examples_min: int = 1) -> list[Dataset]:
    """Split examples with skewed labels. Every example is in exactly one part.

    For each class, the shares of the parts are drawn from Dirichlet(`alpha`). Near 0, one part gets
    a whole class. A large `alpha` gives an even split. The skew follows Hsu et al. 2019
    (arXiv:1909.06335). As in Yurochkin et al. 2019 (arXiv:1905.12022), there is one draw per class,
    not per part. So no example is left over, but the parts also differ in size. Parts with fewer
    than `examples_min` examples receive random examples of the largest parts.

    Raises `ConfigError` for an argument out of range, `DataError` for too few examples.

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
