"""JAX on a fleet: `model` for `train`, `Hub` and `Agent`; `params` for `join`.

A tree of parameters is told by its paths: {"0": {"weight": ...}} has the array "0.weight". None of this is
imported unless it is asked for; it needs the extra `jax`.
"""

from edgeasync.jax.models import model
from edgeasync.jax.parameters import params

__all__ = ["model", "params"]
