"""Trains JAX models on a fleet: `model` for `train`, `Hub` and `Agent`; `params` for `join`.

Arrays are named by their paths in a tree: {"0": {"weight": ...}} has the array "0.weight". This
module is imported only on first use and needs the extra `jax`.
"""

from edgeasync.jax.models import model
from edgeasync.jax.parameters import params

__all__ = ["model", "params"]
