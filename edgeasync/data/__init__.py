"""A device's local data: examples in memory, where they come from, and how to part them among devices."""

from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.files import load
from edgeasync.data.iterables import from_iterable
from edgeasync.data.partition import dirichlet, iid

__all__ = ["Dataset", "batches", "dirichlet", "from_iterable", "iid", "load"]
