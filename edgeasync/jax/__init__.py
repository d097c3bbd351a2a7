"""Train JAX parameter trees: `model` for `train`, `Hub` and `Agent`, and `params` for `join`.

Arrays are named by their paths in the tree: the tree {"0": {"weight": ...}} has the array
"0.weight". This module requires the extra `jax`, and `import edgeasync` does not import it.
"""

from edgeasync.jax.models import model
from edgeasync.jax.parameters import params

__all__ = ["model", "params"]
