"""Local data of a device: datasets in memory, file loaders, and partitioning among devices.

>>> import numpy as np
>>> from edgeasync import data
>>> parts = data.iid(data.Dataset.of(np.eye(4), [0, 1, 0, 1]), 2, seed=0)
>>> len(parts)
2
"""

from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.digits import load_digits
from edgeasync.data.files import load
from edgeasync.data.iterables import from_iterable
from edgeasync.data.lazy import from_samples
from edgeasync.data.partition import dirichlet, iid

__all__ = ["Dataset", "batches", "dirichlet", "from_iterable", "from_samples", "iid", "load", "load_digits"]
