"""A torch module in a session, with the optimizers that step it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError
from edgeasync.parameters import Arrays
from edgeasync.sdk.participants import AddingParticipant
from edgeasync.sdk.torch_copies import Copies
from edgeasync.sdk.torch_exchanged import Exchanged
from edgeasync.sdk.torch_modules import check_alone, dump_states, frozen_of, load_states, rounds
from edgeasync.sdk.torch_steps import Optimizers, watch_steps


class TorchParticipant(AddingParticipant):
    """A torch module in a session, and its optimizer if it is known.

    The session exchanges the module's trained parameters, each once even if it has several names.
    It also exchanges the floating-point buffers in the state dict, as statistics. Frozen parameters
    and other buffers are not exchanged.

    The loop may replace a tensor by another one of the same shape, or freeze a parameter. If the
    loop unfreezes, adds, removes or resizes parameters after `join`, the next step raises
    `ModelMismatchError`. If the optimizer does not step the module's parameters any more, the next
    step raises `ConfigError`.
    """

    def __init__(self, module: nn.Module, optimizer: object = None, also: Sequence[Any] = ()) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; pass a torch.optim optimizer")
        for one in also:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(
                    f"the argument also contains a {type(one).__name__}; pass objects with state_dict and "
                    "load_state_dict"
                )
        check_alone()
        self._kept = [*([] if optimizer is None else [optimizer]), *also]
        self._exchanged = Exchanged(module)
        self._optimizers = Optimizers(optimizer, self._exchanged)
        self._copies = Copies()
        self.parameters = self._exchanged.parameters
        self.frozen = frozen_of(module)

    @property
    def rounds(self) -> bool:
        """Whether the module rounds the values that are written to it."""
        return rounds(self._exchanged.tensors)

    @property
    def has_unsent(self) -> bool:
        """Whether an optimizer has stepped the module since the last step that counted."""
        return self._optimizers.has_unsent

    def note_step(self) -> None:
        """Check the module after a step that counts; raise an error if it has become unsuitable."""
        check_alone()
        self._follow()
        self._optimizers.note_counted()

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into `arrays`."""
        self.begin_read(arrays)()

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Record the module's current values; return a function that copies them into `arrays`.

        The function may be called from any thread.
        """
        check_alone()
        self._follow()
        return self._copies.begin_read(self._exchanged.tensors, arrays)

    def write(self, arrays: Arrays) -> None:
        """Copy the values of `arrays` into the module."""
        self._follow()
        self._optimizers.begin_write()
        self._copies.write(self._exchanged.tensors, arrays)
        self._optimizers.end_write()

    def stage(self, arrays: Arrays) -> None:
        """Prepare the next call of `add` with the same arrays; called outside the loop's thread."""
        self._copies.stage(arrays)

    def add(self, arrays: Arrays) -> None:
        """Add `arrays` to the module's parameters, and replace its statistics."""
        self._follow()
        self._optimizers.begin_write()
        trained = {parameter.name for parameter in self.parameters if parameter.role == "trained"}
        self._copies.add(self._exchanged.tensors, arrays, trained)
        self._optimizers.end_write()

    def _follow(self) -> None:
        self._optimizers.note_replaced(self._exchanged.follow())

    def pending(self) -> str | None:
        """Return the name of a tensor that a backward pass still needs, or `None`.

        Call this after every optimizer step.
        """
        return self._exchanged.saved.pending(self._optimizers.stepped())

    def reset_optimizer(self) -> None:
        """Reset the state of the optimizers, but keep their groups, so that schedules continue."""
        self._optimizers.reset()

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:
        """Call `on_step` after each step of the optimizer.

        If no optimizer was passed, steps of every optimizer of the module's parameters are counted.
        """

        def stepped(optimizer: Optimizer) -> None:
            if self._optimizers.counts(optimizer):
                on_step()

        return watch_steps(stepped)

    def state(self) -> TrainerState:
        """Serialize the states of the optimizer and of the other objects to resume."""
        return {"torch": dump_states(self._kept)} if self._kept else {}

    def restore(self, state: TrainerState) -> None:
        """Restore a result of `state`; raises `ValueError` if it does not fit these objects."""
        if self._kept and "torch" in state:
            load_states(self._kept, state["torch"])
