"""Converts JAX trees to named arrays and back."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from edgeasync.errors import ConfigError
from edgeasync.parameters import Arrays, Parameter
from edgeasync.protocol.messages import Frozen
from edgeasync.training.frozen import FrozenArray, frozen_checksum, pieces_of


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def parameters_of(tree: Any) -> list[Parameter]:
    """Return names and shapes of a tree's arrays.

    Raises `ConfigError` unless they can be trained.
    """
    named = _named(tree)
    if not named:
        raise ConfigError("params has no arrays; pass a tree with at least one")
    for name, leaf in named:
        if getattr(leaf, "dtype", None) != np.float32:
            raise ConfigError(
                f"params: {name!r} is not a float32 array; pass only float32, and close over arrays not to train"
            )
    return [Parameter(name, tuple(leaf.shape)) for name, leaf in named]


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's arrays by path."""
    return {name: tuple(np.shape(leaf)) for name, leaf in _named(tree)}


def arrays_of(tree: Any) -> Arrays:
    """Return the values of a tree's arrays by path."""
    return {name: np.asarray(leaf) for name, leaf in _named(tree)}


def frozen_of(tree: Any) -> Frozen | None:
    """Return the checksum of a tree's arrays, or `None`. Raises `ConfigError` for random keys."""
    for name, leaf in _named(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(f"frozen contains {name!r}, a random key; remove it")
    return frozen_checksum(
        "jax", [FrozenArray(name, np.shape(leaf), pieces_of(leaf)) for name, leaf in _named(tree)]
    )


def read_tree(tree: Any, arrays: Arrays) -> None:
    """Copy the tree's values into these arrays."""
    begin_read_tree(tree, arrays)()


def begin_read_tree(tree: Any, arrays: Arrays) -> Callable[[], None]:
    """Copy the tree's current values. Return a function that fills the arrays, on any thread.

    Arrays on a GPU are only concatenated there. The returned function waits for that, and copies
    them to the host.
    """
    named = _named(tree)
    if gpu_of(tree) is None:
        for name, leaf in named:
            arrays[name][...] = np.asarray(leaf)
        return lambda: None
    targets = [arrays[name] for name, _ in named]
    cuts = _cuts(targets)
    pieces = _gathered([leaf for _, leaf in named], cuts)

    def fill() -> None:
        for (start, end), piece in zip(cuts, pieces, strict=True):
            values, done = np.asarray(piece), 0
            for part in _parts(targets, start, end):
                np.copyto(part, values[done : done + part.size])
                done += part.size

    return fill


def tree_like(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a tree like this one with copies of the values, because JAX may keep its inputs."""
    layout = layout_of(tree)
    return layout.tree(layout.stage(arrays))


class Layout(NamedTuple):
    """How arrays form a tree. Threads use it without the tree, whose arrays may be donated."""

    structure: Any
    shapes: dict[str, tuple[int, ...]]
    gpu: Any
    """The GPU that contains all arrays, or None."""
    is_committed: bool
    """Whether some arrays are committed to their device. Others would make the loop compile its
    step again.
    """

    def stage(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Copy the arrays' values to the device, and wait until they have arrived."""
        if self.gpu is None:
            return [jax.numpy.array(arrays[name]) for name in self.shapes]
        sources = [arrays[name] for name in self.shapes]
        pieces = (np.concatenate(list(_parts(sources, start, end))) for start, end in _cuts(sources))
        device = self.gpu if self.is_committed else None
        return [jax.device_put(piece, device).block_until_ready() for piece in pieces]

    def tree(self, staged: list[Any]) -> Any:
        """Return a tree of the staged values."""
        leaves = staged if self.gpu is None else _split(staged, tuple(self.shapes.values()))
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def sum(self, tree: Any, staged: list[Any]) -> Any:
        """Return a tree plus the staged values. On a GPU this is a single launch."""
        if self.gpu is None:
            return jax.tree.map(jax.numpy.add, tree, self.tree(staged))
        return _added(tree, staged)


def layout_of(tree: Any) -> Layout:
    """Return the layout of a tree."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    is_committed = any(getattr(leaf, "committed", False) for leaf in leaves)
    return Layout(structure, shapes_of(tree), gpu_of(tree), is_committed)


def gpu_of(tree: Any) -> Any:
    """Return the device of all arrays of a tree, or None for a CPU or several devices."""
    leaves = jax.tree_util.tree_leaves(tree)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    devices = {device for leaf in leaves for device in leaf.devices()}
    return next((device for device in devices if len(devices) == 1 and device.platform != "cpu"), None)


PIECE = 2**20
"""Number of values copied between host and GPU at once, 4 MB.

Copies of the loop, such as its loss, may wait for such a piece, because JAX has few streams. They
do not wait for the whole model.
"""

PIECES_MAX = 32
"""Largest number of pieces; more would take long to compile."""


def _cuts(arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the start and end of each piece in the values of all arrays."""
    length = sum(array.size for array in arrays)
    size = max(PIECE, -(-length // PIECES_MAX))
    return tuple((start, min(start + size, length)) for start in range(0, length, size))


def _parts(arrays: Iterable[Any], start: int, end: int) -> Iterator[Any]:
    """Yield the flat parts of arrays with the values from `start` to `end` of all of them."""
    before = 0
    for array in arrays:
        first, last = max(start - before, 0), min(end - before, array.size)
        if first < last:
            yield array.reshape(-1)[first:last]
        before += array.size


@partial(jax.jit, static_argnums=1)
def _gathered(leaves: Sequence[Any], cuts: tuple[tuple[int, int], ...]) -> list[Any]:
    """Return copies of the leaves' values in pieces, because the loop may donate the leaves."""
    return [jax.numpy.copy(jax.numpy.concatenate(list(_parts(leaves, start, end)))) for start, end in cuts]


@partial(jax.jit, static_argnums=1)
def _split(pieces: Sequence[Any], shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """Return the values of pieces in these shapes."""
    ends = accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [
        jax.numpy.concatenate(list(_parts(pieces, start, end))).reshape(shape)
        if start < end
        else jax.numpy.zeros(shape, np.float32)
        for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]


@partial(jax.jit)
def _added(tree: Any, pieces: Sequence[Any]) -> Any:
    """Return the sums of a tree's leaves and the values of pieces."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    parts = _split(pieces, tuple(leaf.shape for leaf in leaves))
    return jax.tree_util.tree_unflatten(structure, [leaf + part for leaf, part in zip(leaves, parts, strict=True)])
