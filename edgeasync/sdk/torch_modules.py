"""torch modules in a session: what of them takes part, and how it is read and written."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError
from edgeasync.parameters import Parameter

Arrays = Mapping[str, npt.NDArray[np.float32]]


class TorchParticipant:
    """A module in a session, and its optimizer if it is known.

    Its trained parameters take part, each once, however many names it has. So do its floating buffers, as
    statistics. Frozen parameters and other buffers stay as they are.
    """

    def __init__(self, module: nn.Module, optimizer: object = None, also: Sequence[Any] = ()) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim")
        for one in also:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(f"also has a {type(one).__name__}; give what has state_dict and load_state_dict")
        self._kept = [*([] if optimizer is None else [optimizer]), *also]
        self._optimizer = optimizer
        self._used: list[torch.optim.Optimizer] = [] if optimizer is None else [optimizer]
        self._exchanged = exchanged_of(module)
        self._trained = {id(tensor) for tensor in self._exchanged.values() if tensor.requires_grad}
        self.parameters = parameters_of(module)

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into these arrays."""
        read_tensors(self._exchanged, arrays)

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the module."""
        write_tensors(self._exchanged, arrays)

    def reset_optimizer(self) -> None:
        """Forget the state of the optimizers that have stepped, but for their groups: schedules continue."""
        for optimizer in self._used:
            for tensor in list(optimizer.state):
                if id(tensor) in self._trained:
                    del optimizer.state[tensor]

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:
        """Call `on_step` after each step of the optimizer or, without one, of any that has these parameters."""

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            if not self._owns(optimizer):
                return
            if all(optimizer is not used for used in self._used):
                self._used.append(optimizer)
            on_step()

        if self._optimizer is None:
            hook = register_optimizer_step_post_hook(stepped)
        else:
            hook = self._optimizer.register_step_post_hook(stepped)
        return hook.remove  # type: ignore[no-any-return]

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return True
        return any(id(tensor) in self._trained for group in optimizer.param_groups for tensor in group["params"])

    def state(self) -> TrainerState:
        """Return the state of the optimizer, and of what else resumes, as an array of bytes."""
        return {"torch": dump_states(self._kept)} if self._kept else {}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is of other things."""
        if self._kept and "torch" in state:
            load_states(self._kept, state["torch"])


def dump_states(kept: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """Return the states of optimizers and the like as an array of bytes."""
    content = io.BytesIO()
    torch.save([one.state_dict() for one in kept], content)
    return np.frombuffer(content.getvalue(), np.uint8)


def load_states(kept: Sequence[Any], content: npt.NDArray[np.uint8]) -> None:
    """Restore what `dump_states` returned; raises `ValueError` if it is of other things."""
    try:
        states = torch.load(io.BytesIO(content.tobytes()), weights_only=True)
        for one, state in zip(kept, states, strict=True):
            one.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"what was kept cannot be read: {error}") from error


def exchanged_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that take part: those that are trained, then floating buffers."""
    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not trained:
        raise ConfigError(f"{type(module).__name__} has no parameters that can be trained")
    return trained | {name: tensor for name, tensor in module.named_buffers() if tensor.is_floating_point()}


def parameters_of(module: nn.Module) -> list[Parameter]:
    """Return the names, shapes and roles of what takes part."""
    return [
        Parameter(name, tuple(tensor.shape), "trained" if tensor.requires_grad else "statistic")
        for name, tensor in exchanged_of(module).items()
    ]


def read_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy tensors into arrays."""
    with torch.no_grad():
        for name, array in arrays.items():
            torch.from_numpy(array).copy_(tensors[name])


def write_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy arrays into tensors."""
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
