"""A torch module in a session, and the optimizers that step it."""

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
    """A module in a session, and its optimizer if it is known.

    Its trained parameters take part, each once, however many names it has. So do the floating buffers of its state
    dict, as statistics. Frozen parameters and other buffers stay as they are.

    The session follows a loop that replaces a tensor by one of the same shape, or freezes a parameter. If the loop
    unfreezes, adds, removes or resizes parameters after `join`, the next step raises `ModelMismatchError`. If its
    optimizer no longer steps the module's parameters, the next step raises `ConfigError`.
    """

    def __init__(self, module: nn.Module, optimizer: object = None, also: Sequence[Any] = ()) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim")
        for one in also:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(f"also has a {type(one).__name__}; give what has state_dict and load_state_dict")
        check_alone()
        self._kept = [*([] if optimizer is None else [optimizer]), *also]
        self._exchanged = Exchanged(module)
        self._optimizers = Optimizers(optimizer, self._exchanged)
        self._copies = Copies()
        self.parameters = self._exchanged.parameters
        self.frozen = frozen_of(module)

    @property
    def rounds(self) -> bool:
        """Whether the module rounds the values that it is given."""
        return rounds(self._exchanged.tensors)

    @property
    def has_unsent(self) -> bool:
        """Whether an optimizer has stepped the module since the session read it last."""
        return self._optimizers.has_unsent

    def note_step(self) -> None:
        """Look at the module after a step that counts; raises `ModelMismatchError` or `ConfigError`."""
        check_alone()
        self._follow()
        self._optimizers.note_counted()

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into these arrays."""
        self.begin_read(arrays)()

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Copy the module's values as they are now; return what fills the arrays, in any thread."""
        check_alone()
        self._follow()
        return self._copies.begin_read(self._exchanged.tensors, arrays)

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the module."""
        self._follow()
        self._optimizers.begin_write()
        self._copies.write(self._exchanged.tensors, arrays)
        self._optimizers.end_write()

    def stage(self, arrays: Arrays) -> None:
        """Prepare the next `add`, of the same arrays; called in another thread than the loop's."""
        self._copies.stage(arrays)

    def add(self, arrays: Arrays) -> None:
        """Add these arrays to the module's parameters; its statistics are replaced."""
        self._follow()
        self._optimizers.begin_write()
        trained = {parameter.name for parameter in self.parameters if parameter.role == "trained"}
        self._copies.add(self._exchanged.tensors, arrays, trained)
        self._optimizers.end_write()

    def _follow(self) -> None:
        self._optimizers.note_replaced(self._exchanged.follow())

    def pending(self) -> str | None:
        """Return the name of a tensor whose value a backward pass still needs, or None.

        Call this after every optimizer step.
        """
        return self._exchanged.saved.pending(self._optimizers.stepped())

    def reset_optimizer(self) -> None:
        """Forget the state of the optimizers that have stepped, but for their groups: schedules continue."""
        self._optimizers.reset()

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:
        """Call `on_step` after each step of the optimizer or, without one, of any that has these parameters."""

        def stepped(optimizer: Optimizer) -> None:
            if self._optimizers.counts(optimizer):
                on_step()

        return watch_steps(stepped)

    def state(self) -> TrainerState:
        """Return the state of the optimizer, and of what else resumes, as an array of bytes."""
        return {"torch": dump_states(self._kept)} if self._kept else {}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is of other things."""
        if self._kept and "torch" in state:
            load_states(self._kept, state["torch"])
