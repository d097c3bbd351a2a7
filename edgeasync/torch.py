"""torch modules on a fleet: `model` for `train`, `Hub` and `Agent`, modules themselves for `join`.

`load` puts what a run has trained into a module. None of this is imported unless it is asked for.
"""

import copy
import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.sdk.adapted import Adapted
from edgeasync.sdk.models import Prepared
from edgeasync.sdk.run import Run
from edgeasync.training.evaluation import Evaluation, Evaluator
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import StepResult, Trainer

__all__ = ["load", "model"]

Arrays = Mapping[str, npt.NDArray[np.float32]]
Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch, of what the module returns and of the targets."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

EVALUATED_AT_ONCE = 256
"""How many examples an evaluation gives the module at a time."""


def model(
    module: nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    device: str | torch.device = "cpu",
) -> "TorchModel":
    """Return a module as a model for `train`, `Hub` and `Agent`; it is copied, and never changed.

    - `loss`: the mean loss of a batch; by default cross entropy for whole targets, mean squared error for others.
    - `optimizer`: one of `torch.optim` on the module's parameters, or a function that makes one of parameters. By
      default SGD with the learning rate 0.05.
    - `device`: where to train, such as "cuda".

    >>> import numpy as np
    >>> from torch import nn
    >>> import edgeasync
    >>> data = np.eye(3), np.arange(3)
    >>> module = nn.Linear(3, 3)
    >>> run = edgeasync.train(edgeasync.torch.model(module), data, workers=1, until=edgeasync.Stop(updates=4))
    >>> type(run.model).__name__
    'Linear'
    """
    return TorchModel(module, loss, optimizer, torch.device(device))


def load(module: nn.Module, run: Run | Arrays) -> nn.Module:
    """Put the arrays of a run, or named arrays, into a module; return the module.

    Raises `ModelMismatchError` if they are another model's.
    """
    arrays = run.arrays if isinstance(run, Run) else run
    exchanged = _exchanged(module)
    if exchanged.keys() != arrays.keys():
        name = min(exchanged.keys() ^ arrays.keys())
        raise ModelMismatchError(f"only one of the run and {type(module).__name__} has an array {name!r}")
    _write(exchanged, arrays)
    return module


class TorchModel(Adapted):
    """A module that devices train; `model` makes one."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        device: torch.device,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is {type(module).__name__}; give a torch.nn.Module")
        self._module = copy.deepcopy(module).cpu()
        self._loss = loss or _usual_loss
        self._make_optimizer = _maker_of(optimizer)
        self._device = device
        self.spec = ParameterSpec(tuple(_parameters_of(self._module)))

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model as one that can be trained."""
        exchanged = _exchanged(self._module)
        initial = np.empty(self.spec.length, np.float32)
        _read(exchanged, self.spec.views(initial))
        return Prepared(
            spec=self.spec,
            initial=initial,
            make_trainer=lambda data, seed, _: self._trainer(data, local, seed),
            make_evaluator=self._evaluator,
            restore=lambda arrays: load(copy.deepcopy(self._module), arrays),
        )

    def _trainer(self, data: Dataset, local: LocalTraining, seed: int) -> Trainer:
        module = copy.deepcopy(self._module).to(self._device)
        optimizer = self._make_optimizer([tensor for tensor in module.parameters() if tensor.requires_grad])
        stream = batches(data, local.batch_size, seed)
        return TorchTrainer(
            self.spec, module, self._loss, optimizer, stream, keep_optimizer_state=local.keep_optimizer_state
        )

    def _evaluator(self, data: Dataset) -> Evaluator:
        module = copy.deepcopy(self._module).to(self._device).eval()
        exchanged = _exchanged(module)

        def evaluate(parameters: Vector) -> Evaluation:
            _write(exchanged, self.spec.views(parameters))
            total, right, classes = 0.0, 0, data.y.dtype.kind == "i"
            with torch.no_grad():
                for start in range(0, len(data), EVALUATED_AT_ONCE):
                    part = slice(start, start + EVALUATED_AT_ONCE)
                    x, y = _tensor(data.x[part], self._device), _tensor(data.y[part], self._device)
                    found = module(x)
                    total += float(self._loss(found, y)) * len(y)
                    right += int((found.argmax(1) == y).sum()) if classes else 0
            return Evaluation(total / len(data), right / len(data) if classes else None, len(data))

        return evaluate


class TorchTrainer:
    """Trains a module by an optimizer of torch; on a CPU the parameters are views of the exchanged vector."""

    def __init__(
        self,
        spec: ParameterSpec,
        module: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        stream: Any,
        *,
        keep_optimizer_state: bool = False,
    ) -> None:
        self.spec = spec
        self._module = module.train()
        self._loss = loss
        self._optimizer = optimizer
        self._stream = stream
        self._keeps = keep_optimizer_state
        self._exchanged = _exchanged(module)
        self._device = next(iter(self._exchanged.values())).device
        self._vector: Vector | None = None

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: from now on train this vector in place."""
        self.spec.check(parameters)
        arrays = self.spec.views(parameters)
        if self._device.type != "cpu":
            _write(self._exchanged, arrays)
        elif self._vector is not parameters:
            for name, tensor in self._exchanged.items():
                tensor.data = torch.from_numpy(arrays[name])
        self._vector = parameters
        if not self._keeps:
            self._optimizer.state.clear()

    def step(self) -> StepResult:
        """Take one step of the optimizer, on one batch."""
        assert self._vector is not None
        x, y = next(self._stream)
        x, y = _tensor(x, self._device), _tensor(y, self._device)
        self._optimizer.zero_grad()
        loss = self._loss(self._module(x), y)
        loss.backward()
        self._optimizer.step()
        if self._device.type != "cpu":
            _read(self._exchanged, self.spec.views(self._vector))
        return StepResult(float(loss.detach()), len(y))


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
        self._exchanged = _exchanged(module)
        self._trained = {id(tensor) for tensor in self._exchanged.values() if tensor.requires_grad}
        self.parameters = _parameters_of(module)

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into these arrays."""
        _read(self._exchanged, arrays)

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the module."""
        _write(self._exchanged, arrays)

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
        if not self._kept:
            return {}
        content = io.BytesIO()
        torch.save([one.state_dict() for one in self._kept], content)
        return {"torch": np.frombuffer(content.getvalue(), np.uint8)}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is of other things."""
        if not self._kept or "torch" not in state:
            return
        try:
            states = torch.load(io.BytesIO(state["torch"].tobytes()), weights_only=True)
            for one, kept in zip(self._kept, states, strict=True):
                one.load_state_dict(kept)
        except Exception as error:
            raise ValueError(f"what was kept cannot be read: {error}") from error


def _exchanged(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that take part: those that are trained, then floating buffers."""
    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not trained:
        raise ConfigError(f"{type(module).__name__} has no parameters that can be trained")
    return trained | {name: tensor for name, tensor in module.named_buffers() if tensor.is_floating_point()}


def _parameters_of(module: nn.Module) -> list[Parameter]:
    return [
        Parameter(name, tuple(tensor.shape), "trained" if tensor.requires_grad else "statistic")
        for name, tensor in _exchanged(module).items()
    ]


def _read(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    with torch.no_grad():
        for name, array in arrays.items():
            torch.from_numpy(array).copy_(tensors[name])


def _write(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _usual_loss(found: Any, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return nn.functional.mse_loss(found, y)
    return nn.functional.cross_entropy(found, y)


def _maker_of(optimizer: torch.optim.Optimizer | MakeOptimizer | None) -> MakeOptimizer:
    """Return what makes an optimizer of a module's parameters."""
    if optimizer is None:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    if isinstance(optimizer, torch.optim.Optimizer):
        if len(optimizer.param_groups) != 1:
            raise ConfigError("optimizer has several groups of parameters; give a function that makes it")
        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        return lambda parameters: kind(parameters, **options)
    if not callable(optimizer):
        raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim, or what makes one")
    return optimizer
