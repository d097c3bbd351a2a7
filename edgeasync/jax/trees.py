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
    """Return the names and shapes of a tree's arrays.

    Raises `ConfigError` if one of them cannot be trained.
    """
    named = _named(tree)
    if not named:
        raise ConfigError("params has no arrays; pass a tree with at least one")
    for name, leaf in named:
        if getattr(leaf, "dtype", None) != np.float32:
            raise ConfigError(
                f"params: {name!r} is not a float32 array; pass only float32 arrays, and close over those that "
                "are not trained"
            )
    return [Parameter(name, tuple(leaf.shape)) for name, leaf in named]


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's arrays by path."""
    return {name: tuple(np.shape(leaf)) for name, leaf in _named(tree)}


def arrays_of(tree: Any) -> Arrays:
    """Return the values of a tree's arrays by path."""
    return {name: np.asarray(leaf) for name, leaf in _named(tree)}


def frozen_of(tree: Any) -> Frozen | None:
    """Return the checksum of a tree's arrays, or `None` for an empty tree.

    Raises `ConfigError` for random keys.
    """
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
    """Copy the tree's current values. Return a function that writes them into `arrays` on any thread.

    If the values are on a GPU, this call only starts to concatenate them there. The returned
    function waits for the result, and copies it to the host.
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
    """Return a tree of the same structure with copies of `arrays`, because JAX may alias its inputs."""
    layout = layout_of(tree)
    return layout.tree(layout.stage(arrays))


class Layout(NamedTuple):
    """Describes how arrays form a tree.

    Other threads use it instead of the tree itself, because the loop may donate the tree's arrays.
    """

    structure: Any
    shapes: dict[str, tuple[int, ...]]
    gpu: Any
    """The GPU that contains all arrays, or None."""
    is_committed: bool
    """Whether some arrays are committed to their device. If so, staged arrays must be committed
    as well, because otherwise the loop would compile its step again.
    """

    def stage(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Copy the arrays' values to the device, and wait until the copy is complete."""
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
        """Return the sum of a tree and the staged values. On a GPU, this is a single kernel launch."""
        if self.gpu is None:
            return jax.tree.map(jax.numpy.add, tree, self.tree(staged))
        return _added(tree, staged)


def layout_of(tree: Any) -> Layout:
    """Return the layout of a tree."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    is_committed = any(getattr(leaf, "committed", False) for leaf in leaves)
    return Layout(structure, shapes_of(tree), gpu_of(tree), is_committed)


def gpu_of(tree: Any) -> Any:
    """Return the GPU that contains all arrays of a tree, or None if they are elsewhere."""
    leaves = jax.tree_util.tree_leaves(tree)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    devices = {device for leaf in leaves for device in leaf.devices()}
    return next((device for device in devices if len(devices) == 1 and device.platform != "cpu"), None)


PIECE = 2**20
"""Number of values (4 MB) that are copied between host and GPU at once.

JAX has few streams, so a copy in the training loop, such as that of its loss, may have to wait for
one piece. It does not wait for the whole model.
"""

PIECES_MAX = 32
"""Maximum number of pieces; code for more pieces would take long to compile."""


def _cuts(arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the start and end of each piece in the concatenated values of all arrays."""
    length = sum(array.size for array in arrays)
    size = max(PIECE, -(-length // PIECES_MAX))
    return tuple((start, min(start + size, length)) for start in range(0, length, size))


def _parts(arrays: Iterable[Any], start: int, end: int) -> Iterator[Any]:
    """Yield flat parts of the arrays: the values from `start` to `end` of their concatenation."""
    before = 0
    for array in arrays:
        first, last = max(start - before, 0), min(end - before, array.size)
        if first < last:
            yield array.reshape(-1)[first:last]
        before += array.size


@partial(jax.jit, static_argnums=1)
def _gathered(leaves: Sequence[Any], cuts: tuple[tuple[int, int], ...]) -> list[Any]:
    """Copy the leaves' values into pieces. The leaves themselves may be donated by the loop."""
    return [jax.numpy.copy(jax.numpy.concatenate(list(_parts(leaves, start, end)))) for start, end in cuts]


@partial(jax.jit, static_argnums=1)
def _split(pieces: Sequence[Any], shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """Split the concatenated values of pieces into arrays of these shapes."""
    ends = accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [
        jax.numpy.concatenate(list(_parts(pieces, start, end))).reshape(shape)
        if start < end
        else jax.numpy.zeros(shape, np.float32)
        for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]


@partial(jax.jit)
def _added(tree: Any, pieces: Sequence[Any]) -> Any:
    """Add the values of pieces to the leaves of a tree."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    parts = _split(pieces, tuple(leaf.shape for leaf in leaves))
    return jax.tree_util.tree_unflatten(structure, [leaf + part for leaf, part in zip(leaves, parts, strict=True)])
