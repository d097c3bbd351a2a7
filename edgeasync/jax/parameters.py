"""What holds a tree of parameters for `join`."""

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
    """Return a holder of parameters for `join`: arrays of JAX never change, so the session sets its `.value`.

    A loop reads `.value` and sets it, then calls `session.step()`. So it does with `.optimizer_state`, if it gives
    that: an exchange puts the first one back where the hub says so, and a script that is killed resumes with it.
    `frozen` is a tree of arrays that the loop uses and does not train: the hub refuses a device with other values.

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
    """A tree of parameters in a session; `params` makes one."""

    rounds = False  # all are float32

    def __init__(self, tree: Any, optimizer_state: Any, frozen: Any) -> None:
        self.value = tree
        """The tree as it is now."""
        self.optimizer_state = optimizer_state
        """That of the loop's optimizer, if it is kept here."""
        self._begun = optimizer_state
        self._staged: Any = None
        self._layout = layout_of(tree)
        self.parameters = parameters_of(tree)
        self.frozen = frozen_of(frozen)

    def read(self, arrays: Arrays) -> None:
        """Copy the tree's values into these arrays; raises `ModelMismatchError` if it has others than at join."""
        self.begin_read(arrays)()

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Copy the tree's values as they are now; return what fills the arrays, in any thread."""
        self.note_step()
        self._layout = layout_of(self.value)
        return begin_read_tree(self.value, arrays)

    def note_step(self) -> None:
        """Raise `ModelMismatchError` if the tree has others than at join."""
        joined = {parameter.name: parameter.shape for parameter in self.parameters}
        if different := joined.items() ^ shapes_of(self.value).items():
            name = min(different)[0]
            raise ModelMismatchError(
                f"params: {name!r} has another shape than at join, was added, or is gone; a session exchanges the "
                "arrays that were there at join"
            )

    def write(self, arrays: Arrays) -> None:
        """Set a tree of these arrays' values; raises `ModelMismatchError` if it has others than at join."""
        self.note_step()
        self.value = tree_like(self.value, arrays)

    def stage(self, arrays: Arrays) -> None:
        """Move these arrays to the device, for the next `add`; called in another thread than the loop's."""
        self._staged = self._layout.stage(arrays)

    def add(self, arrays: Arrays) -> None:  # noqa: ARG002 - `stage` has them
        """Add the arrays of the last `stage` to the tree's values."""
        self.note_step()
        self.value = self._layout.sum(self.value, self._staged)
        self._staged = None

    def reset_optimizer(self) -> None:
        """Set the optimizer's state that was given first."""
        self.optimizer_state = self._begun

    def state(self) -> TrainerState:
        """Return the optimizer's state as arrays."""
        leaves = jax.tree_util.tree_leaves(self.optimizer_state)
        return {str(number): np.array(leaf) for number, leaf in enumerate(leaves)}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is of another optimizer."""
        ours = self.state()
        if {name: (array.shape, array.dtype) for name, array in state.items()} != {
            name: (array.shape, array.dtype) for name, array in ours.items()
        }:
            raise ValueError("a state of another optimizer")
        leaves = [jax.numpy.asarray(state[name]) for name in ours]
        self.optimizer_state = jax.tree_util.tree_unflatten(
            jax.tree_util.tree_structure(self.optimizer_state), leaves
        )
