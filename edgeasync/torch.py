"""torch modules on a fleet: as participants of a session (`edgeasync.join`)."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError
from edgeasync.parameters import Parameter

Arrays = Mapping[str, npt.NDArray[np.float32]]


class TorchParticipant:
    """A module, and its optimizer if it is known.

    Its trained parameters take part, each once, however many names it has. So do its floating buffers, as statistics.
    Frozen parameters and other buffers stay as they are.
    """

    def __init__(self, module: torch.nn.Module, optimizer: object = None) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim")
        self._optimizer = optimizer
        self._used: list[torch.optim.Optimizer] = [] if optimizer is None else [optimizer]
        trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        statistics = {name: tensor for name, tensor in module.named_buffers() if tensor.is_floating_point()}
        if not trained:
            raise ConfigError(f"{type(module).__name__} has no parameters that can be trained")
        self._tensors = trained | statistics
        self._trained = set(map(id, trained.values()))
        self.parameters = [
            *[Parameter(name, tuple(tensor.shape)) for name, tensor in trained.items()],
            *[Parameter(name, tuple(tensor.shape), "statistic") for name, tensor in statistics.items()],
        ]

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into these arrays."""
        with torch.no_grad():
            for name, array in arrays.items():
                torch.from_numpy(array).copy_(self._tensors[name])

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the module."""
        with torch.no_grad():
            for name, array in arrays.items():
                self._tensors[name].copy_(torch.from_numpy(array))

    def reset_optimizer(self) -> None:
        """Forget the state of the optimizers that have stepped, but for their groups: schedules go on."""
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

        if self._optimizer is not None:
            return self._optimizer.register_step_post_hook(stepped).remove
        return register_optimizer_step_post_hook(stepped).remove

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return True
        return any(id(tensor) in self._trained for group in optimizer.param_groups for tensor in group["params"])

    def state(self) -> TrainerState:
        """Return the optimizer's state as an array of bytes, if the optimizer is known."""
        if self._optimizer is None:
            return {}
        content = io.BytesIO()
        torch.save(self._optimizer.state_dict(), content)
        return {"optimizer": np.frombuffer(content.getvalue(), np.uint8)}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is another optimizer's."""
        if self._optimizer is None or "optimizer" not in state:
            return
        try:
            content = io.BytesIO(state["optimizer"].tobytes())
            self._optimizer.load_state_dict(torch.load(content, weights_only=True))
        except Exception as error:
            raise ValueError(f"the state of the optimizer cannot be read: {error}") from error
