"""Trees of JAX as named arrays, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from edgeasync.errors import ConfigError
from edgeasync.parameters import Parameter
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk.models import Arrays
from edgeasync.training.frozen import FrozenArray, frozen_checksum, pieces_of


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def parameters_of(tree: Any) -> list[Parameter]:
    """Return names and shapes; raises `ConfigError` for what can not be trained."""
    named = _named(tree)
    if not named:
        raise ConfigError("params has no arrays; give a tree with at least one")
    for name, leaf in named:
        if getattr(leaf, "dtype", None) != np.float32:
            raise ConfigError(
                f"params: {name!r} is no float32 array; give those, and close over what is not trained"
            )
    return [Parameter(name, tuple(leaf.shape)) for name, leaf in named]


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's arrays by their paths."""
    return {name: tuple(np.shape(leaf)) for name, leaf in _named(tree)}


def arrays_of(tree: Any) -> Arrays:
    """Return the values by the paths of the tree."""
    return {name: np.asarray(leaf) for name, leaf in _named(tree)}


def frozen_of(tree: Any) -> Frozen | None:
    """Return the checksum of a tree's arrays, `None` if it has none."""
    return frozen_checksum(
        "jax", [FrozenArray(name, np.shape(leaf), pieces_of(leaf)) for name, leaf in _named(tree)]
    )


def read_tree(tree: Any, arrays: Arrays) -> None:
    """Copy the tree's values into these arrays."""
    for name, leaf in _named(tree):
        arrays[name][...] = np.asarray(leaf)


def tree_like(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a tree like this one with copies of the arrays' values: JAX may keep what it is given."""
    leaves = [jax.numpy.array(arrays[name]) for name, _ in _named(tree)]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)
