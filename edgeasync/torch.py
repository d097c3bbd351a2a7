"""torch modules on a fleet: `model` for `train`, `Hub` and `Agent`, modules themselves for `join`.

`load` puts what a run has trained into a module, and `to_onnx` makes one for devices without torch. None of this
is imported unless it is asked for.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.data.dataset import Batches, Dataset, Features, Inputs, batches
from edgeasync.errors import ConfigError, DataError, ModelMismatchError
from edgeasync.metrics import Meter
from edgeasync.parameters import Arrays, ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk.adapted import Adapted
from edgeasync.sdk.models import Prepared
from edgeasync.sdk.run import Run
from edgeasync.sdk.torch_copies import Copies
from edgeasync.sdk.torch_export import to_onnx
from edgeasync.sdk.torch_modules import (
    copy_of,
    dump_states,
    exchanged_of,
    frozen_of,
    hooked,
    listed,
    load_states,
    parameters_of,
    read_tensors,
    rounds,
    training,
    write_tensors,
)
from edgeasync.sdk.torch_scores import ROWS, check_scores, scores_of
from edgeasync.sdk.torch_steps import watch_steps
from edgeasync.training.evaluation import EvaluationResult, Evaluator, add_up, mean_of
from edgeasync.training.losses import LossSum
from edgeasync.training.plan import LocalTraining
from edgeasync.training.rounding import Rounding
from edgeasync.training.trainer import StepResult, Trainer

__all__ = ["load", "model", "to_onnx", "watch_steps"]

LOG = logging.getLogger("edgeasync.torch")

Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch, of what the module returns and of the targets."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ELEMENTWISE: tuple[object, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss),
    *(nn.functional.binary_cross_entropy, nn.functional.binary_cross_entropy_with_logits),
)
"""Losses of values, each against one of the targets. If their shapes differ, torch may repeat both, unasked."""

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
      Losses of torch that compare values one by one take targets (n,) for an output (n, 1). A loss of your own is
      given what the module returns, such as a dict. Unless that is one tensor of scores for the targets, there
      is no accuracy, and there are no metrics.
    - `optimizer`: one of `torch.optim` on the module's parameters, all that are not frozen; its groups count, with
      the learning rates that they have now. Or a function that makes one of parameters. By default SGD with the
      learning rate 0.05.
    - `device`: where to train, such as "cuda".

    A module of several inputs takes them by the names that the data has for them.

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

    >>> import numpy as np
    >>> from torch import nn
    >>> from edgeasync.torch import load
    >>> load(nn.Linear(1, 1), {"weight": np.ones((1, 1)), "bias": np.zeros(1)}).weight.tolist()
    [[1.0]]
    """
    arrays = run.arrays if isinstance(run, Run) else run
    exchanged = exchanged_of(module)
    if exchanged.keys() != arrays.keys():
        name = min(exchanged.keys() ^ arrays.keys())
        raise ModelMismatchError(f"only one of the run and {type(module).__name__} has an array {name!r}")
    write_tensors(exchanged, arrays)
    return module


class TorchModel(Adapted):
    """A module that devices train; `model` makes one."""

    optimizer_is = "give one of torch.optim to edgeasync.torch.model"
    measures = True

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        device: torch.device,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is {type(module).__name__}; give a torch.nn.Module")
        self._module = copy_of(module).cpu()
        _check_mean(loss)
        fitted = _fitting(loss) or _usual_loss
        self._takes_values = fitted is not loss and loss is not None
        self._is_known = _is_known(loss)
        self._given_loss = loss
        self._loss = _of_a_tensor(fitted) if self._is_known else fitted
        self._ignored_label: int | None = getattr(loss, "ignore_index", None)
        self._make_optimizer = _maker_of(optimizer, module)
        self._device = device
        self.spec = ParameterSpec(tuple(parameters_of(self._module)))
        self.frozen = frozen_of(self._module)

    def __getstate__(self) -> dict[str, Any]:
        if names := hooked(self._module):
            raise ConfigError(
                f"the gradient of {listed(names)} has a hook, which no other process gets; train with "
                "engine='tasks', or leave it out"
            )
        return self.__dict__

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model as one that can be trained."""
        exchanged = exchanged_of(self._module)
        initial = np.empty(self.spec.length, np.float32)
        read_tensors(exchanged, self.spec.views(initial))
        return Prepared(
            spec=self.spec,
            initial=initial,
            make_trainer=lambda data, seed, _: self._trainer(data, local, seed),
            make_evaluator=self._evaluator,
            restore=lambda arrays: load(copy_of(self._module), arrays),
            frozen=self.frozen,
        )

    def _trainer(self, data: Dataset, local: LocalTraining, seed: int) -> Trainer:
        data = self._targets_of(data)
        module = copy_of(self._module).to(self._device)
        if scores := scores_of(self._given_loss, whole_targets=data.y.dtype.kind == "i"):
            x = data.features[np.arange(min(ROWS, len(data)))]
            check_scores(module, lambda tried: _returned(tried, x, self._device), scores)
        optimizer = self._make_optimizer([tensor for tensor in module.parameters() if tensor.requires_grad])
        stream = _stream(data, local.batch_size, seed, norms=_has_norms(module))
        meter = local.make_meter(
            "cross_entropy" if data.y.dtype.kind == "i" else "mse", ignored_label=self._ignored_label
        )
        keeps = local.keep_optimizer_state
        return TorchTrainer(
            self.spec,
            module,
            self._loss,
            optimizer,
            stream,
            keep_optimizer_state=keeps,
            meter=meter,
            frozen=self.frozen,
        )

    def _targets_of(self, data: Dataset) -> Dataset:
        """Return data whose whole numbers are values where the loss takes values, as for ONNX.

        Raises `DataError` for inputs that the module does not have.
        """
        if isinstance(data.features, Inputs):
            taken = inspect.signature(self._module.forward)
            try:
                taken.bind(**data.features.arrays)
            except TypeError:
                raise DataError(
                    f"the data has the inputs {', '.join(data.features.arrays)}, and "
                    f"{type(self._module).__name__}.forward takes {', '.join(taken.parameters)}; name them alike"
                ) from None
        whole = self._takes_values and data.y.dtype.kind == "i"
        return Dataset(data.features, data.y.astype(np.float32)) if whole else data

    def _evaluator(self, data: Dataset) -> Evaluator:
        data = self._targets_of(data)
        module = copy_of(self._module).to(self._device).eval()
        exchanged, copies = exchanged_of(module), Copies()

        def evaluate(parameters: Vector) -> EvaluationResult:
            copies.write(exchanged, self.spec.views(parameters))
            with torch.no_grad():
                return add_up(data.features, data.y, EVALUATED_AT_ONCE, loss_of)

        def loss_of(x: Any, y: Any) -> LossSum:
            found = _returned(module, x, self._device)
            loss = float(self._loss(found, _tensor(y, self._device)))
            classes = found.argmax(1).cpu().numpy() if y.dtype.kind == "i" and self._tells(found, y) else None
            return mean_of(loss, y, classes, ignored_label=self._ignored_label)

        return evaluate

    def _tells(self, found: Any, y: npt.NDArray[Any]) -> bool:
        return self._is_known or _fits(found, y)


class TorchTrainer:
    """Trains a module by an optimizer of torch.

    On a CPU the parameters are float32 views of the exchanged vector. Elsewhere they are copied at the beginning
    of an assignment, and by `flush`; a step reads its loss alone.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        module: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        stream: Any,
        *,
        keep_optimizer_state: bool = False,
        meter: Meter | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        self.spec = spec
        self.frozen = frozen
        self._meter = meter
        self._module = training(module)
        self._loss = loss
        self._optimizer = optimizer
        self._stream = stream
        self._keeps = keep_optimizer_state
        self._exchanged = exchanged_of(module)
        self._device = next(iter(self._exchanged.values())).device
        self._shares_memory = self._device.type == "cpu"
        self._copies = Copies()
        self._is_ahead = False
        """Whether steps have changed the module since the vector had its values."""
        self._vector: Vector | None = None
        self._rounding: Rounding | None = None
        self._factor = 1.0
        self._told = False

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: from now on train this vector in place."""
        self.spec.check(parameters)
        arrays = self.spec.views(parameters)
        if not self._shares_memory:
            self._copies.write(self._exchanged, arrays)
            self._rounding, self._is_ahead = None, False
            if rounds(self._exchanged):
                self._rounding = Rounding(parameters, self._read)
        elif self._vector is not parameters:
            for name, tensor in self._exchanged.items():
                tensor.data = torch.from_numpy(arrays[name])
        self._vector = parameters
        if not self._keeps:
            self.reset()

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self._optimizer.state.clear()

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of every group by this factor; the groups themselves keep theirs."""
        self._factor = factor

    def step(self) -> StepResult:
        """Take one step of the optimizer, on one batch."""
        assert self._vector is not None
        x, targets = next(self._stream)
        y = _tensor(targets, self._device)
        self._optimizer.zero_grad()
        found = self._scores(x)
        loss = self._loss(found, y)
        loss.backward()
        with self._scaled():
            self._optimizer.step()
        self._is_ahead = not self._shares_memory
        if self._meter is not None and self._fits(found, targets):
            self._meter.add(found.detach().cpu().numpy(), targets)
        return StepResult(float(loss.detach()), len(y))

    def flush(self) -> None:
        """Copy the parameters to the vector, where they are not views of it."""
        if not self._is_ahead:
            return
        assert self._vector is not None
        self._read(self._vector)
        if self._rounding is not None:
            self._rounding.undo(self._vector)
        self._is_ahead = False

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """Reduce the groups' learning rates for one step."""
        if self._factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self._factor
        try:
            yield
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _fits(self, found: Any, targets: npt.NDArray[Any]) -> bool:
        """Return whether metrics can be told of what the module returned; says so once if they cannot."""
        if not (fits := _fits(found, targets)) and not self._told:
            self._told = True
            LOG.warning(
                "metrics: the module's output is not one tensor of scores for the targets, so there are none"
            )
        return fits

    def _read(self, vector: Vector) -> None:
        self._copies.read(self._exchanged, self.spec.views(vector))

    def _scores(self, x: Features) -> Any:
        try:
            return _returned(self._module, x, self._device)
        except ValueError as error:
            if len(x) > 1 or not _has_norms(self._module):
                raise
            raise DataError(
                "a batch norm cannot learn from a batch of one example; give more data, and a batch_size over 2"
            ) from error

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call."""
        return {} if self._meter is None else self._meter.take()

    def state(self) -> TrainerState:
        """Return the place in the data, torch's random numbers, and the optimizer's state if it is kept."""
        state = {"batches": self._stream.state(), "random": torch.get_rng_state().numpy()}
        return state | {"optimizer": dump_states([self._optimizer])} if self._keeps else state

    def restore(self, state: TrainerState) -> None:
        """Resume from a state; raises `ValueError` for the state of another trainer or of other data."""
        if state.keys() != self.state().keys():
            raise ValueError("a state of other arrays than this trainer's")
        self._stream.restore(state["batches"])
        if self._keeps:
            load_states([self._optimizer], state["optimizer"])
        torch.set_rng_state(torch.from_numpy(state["random"].copy()))


class _NoneAlone(Batches):
    """Batches of which the last takes an example from the one before it, so that its own is not alone."""

    def draw(self) -> npt.NDArray[np.int64]:
        """Draw the next batch: the numbers of its examples."""
        chosen, left = super().draw(), self.per_epoch - self._next
        if left > 1:
            return chosen
        return chosen[:-1] if left else self._order[-2:]


def _stream(data: Dataset, batch_size: int, seed: int, *, norms: bool) -> Batches:
    """Return batches, each of two examples or more if there are batch norms, which do not take one alone.

    With a `batch_size` of 2 one may be alone: nobody can give it one.
    """
    if not norms or batch_size < 3 or len(data) < batch_size or len(data) % batch_size != 1:
        return batches(data, batch_size, seed)
    return _NoneAlone(data, range(0, len(data), batch_size), seed)


def _has_norms(module: nn.Module) -> bool:
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())  # noqa: SLF001


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _returned(module: nn.Module, x: Features, device: torch.device) -> Any:
    """Return what a module makes of examples; several inputs are given by their names."""
    if isinstance(x, Inputs):
        return module(**{name: _tensor(array, device) for name, array in x.arrays.items()})
    return module(_tensor(x, device))


def _of_a_tensor(loss: Loss) -> Loss:
    """Return a loss that says so if the module returns more than one tensor."""

    def checked(found: Any, y: Tensor) -> Tensor:
        if not isinstance(found, Tensor):
            raise ConfigError(
                f"the module returns a {type(found).__name__}, and the loss takes one tensor; give "
                "edgeasync.torch.model a loss of your own, which takes what the module returns, and the targets"
            )
        return loss(found, y)

    return checked


def _usual_loss(found: Any, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return nn.functional.mse_loss(found, _fitted(found, y))
    return nn.functional.cross_entropy(found, y)


def _fitting(loss: Any) -> Any:
    """Return a loss that takes the targets in the shape of the output, if it is one of torch's that needs it."""
    if type(loss) not in ELEMENTWISE and loss not in ELEMENTWISE:
        return loss
    return lambda found, y: loss(found, _fitted(found, y))


def _fitted(found: Any, y: Tensor) -> Tensor:
    """Return targets in the shape of the module's output: (n,) as (n, 1); raises `DataError` for another shape."""
    one, other = ([size for size in each.shape[1:] if size != 1] for each in (found, y))
    if one != other or len(found) != len(y):
        raise DataError(
            f"the module returns shape {tuple(found.shape)} for targets of shape {tuple(y.shape)}; give a value "
            "for each of the output's"
        )
    return y.reshape(found.shape)


def _fits(found: Any, y: npt.NDArray[Any]) -> bool:
    """Return whether what a module returns is scores of classes for labels, or values for values."""
    if not isinstance(found, Tensor):
        return False
    shape = list(found.shape)
    if y.dtype.kind == "i" and (len(shape) < 2 or shape.pop(1) < 2):
        return False
    return [size for size in shape if size != 1] == [size for size in y.shape if size != 1]


def _is_known(loss: Any) -> bool:
    """Return whether the loss is one of torch's, so that it is known what it takes the output for."""
    loss = getattr(loss, "func", loss)  # of functools.partial
    return loss is None or str((loss if inspect.isroutine(loss) else type(loss)).__module__).startswith("torch.nn")


def _check_mean(loss: Any) -> None:
    """Raise `ConfigError` for a loss of torch that is not the mean of a batch."""
    named = getattr(loss, "keywords", {}).get("reduction")  # of functools.partial
    if (named or getattr(loss, "reduction", None)) in ("sum", "none"):
        raise ConfigError("the loss is no mean of a batch, by its reduction; give reduction='mean'")


def _maker_of(optimizer: torch.optim.Optimizer | MakeOptimizer | None, module: nn.Module) -> MakeOptimizer:
    """Return what makes an optimizer of the parameters of a copy of the module, in their order."""
    if optimizer is None:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _maker_like(optimizer, module)
    if not callable(optimizer):
        raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim, or what makes one")
    return optimizer


def _maker_like(optimizer: torch.optim.Optimizer, module: nn.Module) -> MakeOptimizer:
    """Return what makes an optimizer with the groups of a given one, and with the options that they have now."""
    kind = type(optimizer)
    names = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
    places = {id(tensor): place for place, (_, tensor) in enumerate(names)}
    groups = []
    for group in optimizer.param_groups:
        trained = [tensor for tensor in group["params"] if tensor.requires_grad]
        if any(id(tensor) not in places for tensor in trained):
            raise ConfigError(
                f"optimizer has a parameter that {type(module).__name__} has not; make it of this module's"
            )
        own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append((own, [places[id(tensor)] for tensor in trained]))
    used = {place for _, members in groups for place in members}
    if left := [name for place, (name, _) in enumerate(names) if place not in used]:
        raise ConfigError(
            f"optimizer does not train {left[0]!r}; freeze what is not to be trained, by requires_grad_(False)"
        )
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        all_of_them = list(parameters)
        chosen = [
            {**own, "params": [all_of_them[place] for place in members]} for own, members in groups if members
        ]
        return kind(chosen, **options)

    return make
