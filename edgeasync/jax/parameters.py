"""A mutable container of a parameter tree, for `join`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ModelMismatchError
from edgeasync.jax.trees import begin_read_tree, frozen_of, layout_of, parameters_of, shapes_of, tree_like
from edgeasync.parameters import Arrays
from edgeasync.sdk.participants import AddingParticipant


def params(tree: Any, optimizer_state: Any = None, *, frozen: Any = None) -> "Params":
    """Return a mutable container of parameters for `join`.

    JAX arrays are immutable, so the session replaces the tree in `.value`.

    The training loop reads and sets `.value`, then calls `session.step()`. If `optimizer_state` is
    passed, the loop also reads and sets `.optimizer_state`. The session resets this state if the
    hub requests a reset, and restores it when a killed script is restarted. `frozen` is a tree of
    arrays that the loop uses but does not train. The hub rejects devices with different values.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import edgeasync
    >>> held = edgeasync.jax.params({"w": jnp.zeros(3)})
    >>> with edgeasync.Hub({"w": np.ones(3)}, run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*") as hub:
    ...     with edgeasync.join(hub.address, held) as session:
    ...         held.value = {"w": held.value["w"] + 1}
    ...         session.step()
    >>> held.value["w"].tolist()
    [2.0, 2.0, 2.0]
    """
    return Params(tree, optimizer_state, frozen)


class Params(AddingParticipant):
    """A parameter tree in a session, created by `params`."""

    rounds = False  # all arrays are float32, as in the session

    def __init__(self, tree: Any, optimizer_state: Any, frozen: Any) -> None:
        self.value = tree
        """The current tree."""
        self.optimizer_state = optimizer_state
        """The state of the loop's optimizer, if it is stored here."""
        self._begun = optimizer_state
        self._staged: Any = None
        self._layout = layout_of(tree)
        self.parameters = parameters_of(tree)
        self.frozen = frozen_of(frozen)

    def read(self, arrays: Arrays) -> None:
        """Copy the tree's values into arrays.

        Raises `ModelMismatchError` if the tree's arrays differ from those at `join`.
        """
        self.begin_read(arrays)()

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Copy the tree's current values.

        Return a function that writes them into the arrays, and that any thread may call.
        """
        self.note_step()
        self._layout = layout_of(self.value)
        return begin_read_tree(self.value, arrays)

    def note_step(self) -> None:
        """Raise `ModelMismatchError` if the tree's arrays differ from those at `join`."""
        joined = {parameter.name: parameter.shape for parameter in self.parameters}
        if different := joined.items() ^ shapes_of(self.value).items():
            name = min(different)[0]
            raise ModelMismatchError(
                f"params: {name!r} was added, removed or reshaped after join; a session exchanges only the arrays "
                "that the tree had at join"
            )

    def write(self, arrays: Arrays) -> None:
        """Replace the tree by one with these values.

        Raises `ModelMismatchError` if the tree has different arrays.
        """
        self.note_step()
        self.value = tree_like(self.value, arrays)

    def stage(self, arrays: Arrays) -> None:
        """Copy these arrays to the device for the next `add`.

        Called from a different thread than the training loop.
        """
        self._staged = self._layout.stage(arrays)

    def add(self, arrays: Arrays) -> None:  # noqa: ARG002 - `stage` has copied them
        """Add the arrays of the last call of `stage` to the tree's values."""
        self.note_step()
        self.value = self._layout.sum(self.value, self._staged)
        self._staged = None

    def reset_optimizer(self) -> None:
        """Restore the initial state of the optimizer."""
        self.optimizer_state = self._begun

    def state(self) -> TrainerState:
        """Return the optimizer's state as arrays."""
        leaves = jax.tree_util.tree_leaves(self.optimizer_state)
        return {str(number): np.array(leaf) for number, leaf in enumerate(leaves)}

    def restore(self, state: TrainerState) -> None:
        """Set the optimizer's state from the arrays that `state` returned earlier.

        Raises `ValueError` if they belong to another optimizer.
        """
        ours = self.state()
        if {name: (array.shape, array.dtype) for name, array in state.items()} != {
            name: (array.shape, array.dtype) for name, array in ours.items()
        }:
            raise ValueError("the state belongs to another optimizer")
        leaves = [jax.numpy.asarray(state[name]) for name in ours]
        self.optimizer_state = jax.tree_util.tree_unflatten(
            jax.tree_util.tree_structure(self.optimizer_state), leaves
        )
