"""Trees of JAX as named arrays, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

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
    """Return the checksum of a tree's arrays, `None` if it has none; raises `ConfigError` for keys."""
    for name, leaf in _named(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(f"frozen has {name!r}, a key of random numbers; leave it out")
    return frozen_checksum(
        "jax", [FrozenArray(name, np.shape(leaf), pieces_of(leaf)) for name, leaf in _named(tree)]
    )


def read_tree(tree: Any, arrays: Arrays) -> None:
    """Copy the tree's values into these arrays."""
    begin_read_tree(tree, arrays)()


def begin_read_tree(tree: Any, arrays: Arrays) -> Callable[[], None]:
    """Copy the tree's values as they are now; return what fills the arrays, in any thread.

    Arrays on one GPU are gathered there, and move to the host in one copy.
    """
    named = _named(tree)
    if gpu_of(tree) is not None:
        flat = _gathered([leaf for _, leaf in named])
        flat.copy_to_host_async()
        return lambda: _scatter(np.asarray(flat), [arrays[name] for name, _ in named])
    for name, leaf in named:
        arrays[name][...] = np.asarray(leaf)
    return lambda: None


def tree_like(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a tree like this one with copies of the arrays' values: JAX may keep what it is given.

    They move to a GPU in one copy.
    """
    return layout_of(tree).tree(arrays)


class Layout(NamedTuple):
    """How arrays become a tree. A thread that has it need not look at the tree, whose arrays may be donated."""

    structure: Any
    shapes: dict[str, tuple[int, ...]]
    gpu: Any
    """The one GPU that all arrays are on, or None."""

    def tree(self, arrays: Mapping[str, Any]) -> Any:
        """Return a tree of copies of the arrays' values."""
        if self.gpu is None:
            leaves = [jax.numpy.array(arrays[name]) for name in self.shapes]
        else:
            host = np.concatenate([np.ravel(arrays[name]) for name in self.shapes])
            leaves = _split(jax.device_put(host, self.gpu), tuple(self.shapes.values()))
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def layout_of(tree: Any) -> Layout:
    """Return the layout of a tree."""
    return Layout(jax.tree_util.tree_structure(tree), shapes_of(tree), gpu_of(tree))


def gpu_of(tree: Any) -> Any:
    """Return the one device that all arrays of a tree are on, unless that is a CPU."""
    leaves = jax.tree_util.tree_leaves(tree)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    devices = {device for leaf in leaves for device in leaf.devices()}
    return next((device for device in devices if len(devices) == 1 and device.platform != "cpu"), None)


@partial(jax.jit)
def _gathered(leaves: Sequence[Any]) -> Any:
    return jax.numpy.concatenate([leaf.ravel() for leaf in leaves])


@partial(jax.jit, static_argnums=1)
def _split(flat: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    ends = accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]


def _scatter(flat: npt.NDArray[np.float32], arrays: Sequence[npt.NDArray[np.float32]]) -> None:
    start = 0
    for array in arrays:
        np.copyto(array, flat[start : start + array.size].reshape(array.shape))
        start += array.size
