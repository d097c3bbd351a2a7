"""Trains a torch module whose parameters are stored in a vector."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.data.dataset import Batches, Dataset, Features, Inputs, batches
from edgeasync.errors import DataError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk.torch_copies import Copies
from edgeasync.sdk.torch_losses import TorchLoss, are_scores
from edgeasync.sdk.torch_modules import (
    dump_states,
    exchanged_of,
    load_states,
    rounds,
    training,
)
from edgeasync.training.plan import LocalTraining
from edgeasync.training.rounding import Rounding
from edgeasync.training.trainer import StepResult

LOG = logging.getLogger("edgeasync.torch")


class TorchTrainer:
    """Trains a module with a torch optimizer; a step transfers only the loss to the CPU."""

    def __init__(
        self,
        spec: ParameterSpec,
        module: nn.Module,
        loss: TorchLoss,
        optimizer: torch.optim.Optimizer,
        *,
        data: Dataset,
        local: LocalTraining,
        seed: int,
        frozen: Frozen | None,
    ) -> None:
        self.spec, self.frozen = spec, frozen
        self._held = HeldModule(spec, training(module))
        self._loss = loss
        self._optimizer = optimizer
        self._stream = _stream(data, local.batch_size, seed, norms=_has_norms(module))
        self._keeps = local.keep_optimizer_state
        kind = "cross_entropy" if data.y.dtype.kind == "i" else "mse"
        self._meter = local.make_meter(kind, ignored_label=loss.ignored_label)
        self._factor = 1.0
        self._told = False

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment, in which the vector `parameters` is trained in place."""
        self.spec.check(parameters)
        self._held.begin(parameters)
        if not self._keeps:
            self.reset()

    def reset(self) -> None:
        """Reset the optimizer's state."""
        self._optimizer.state.clear()

    def scale_learning_rate(self, factor: float) -> None:
        """Scale the learning rate of every group during each step.

        Between steps, the groups have their original learning rates.
        """
        self._factor = factor

    def step(self) -> StepResult:
        """Train one batch."""
        x, targets = next(self._stream)
        y = tensor_of(targets, self._held.device)
        self._optimizer.zero_grad()
        found = self._scores(x)
        loss = self._loss(found, y)
        loss.backward()
        with self._scaled():
            self._optimizer.step()
        self._held.note_step()
        if self._meter is not None and self._fits(found, targets):
            self._meter.add(found.detach().float().cpu().numpy(), targets)
        return StepResult(float(loss.detach()), len(y))

    def flush(self) -> None:
        """Copy the parameters into the vector, unless they are views of it."""
        self._held.flush()

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """Scale the groups' learning rates for one step."""
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
        """Return whether metrics can be computed from an output; if not, log this once."""
        if not (fits := are_scores(found, targets)) and not self._told:
            self._told = True
            LOG.warning(
                "metrics: none are reported, because the output is not one tensor of scores for the targets"
            )
        return fits

    def _scores(self, x: Features) -> Any:
        try:
            return returned(self._held.module, x, self._held.device)
        except ValueError as error:
            if len(x) > 1 or not _has_norms(self._held.module):
                raise
            raise DataError(
                "a batch norm cannot train on a batch of one example; use more data, and a batch_size above 2"
            ) from error

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call."""
        return {} if self._meter is None else self._meter.take()

    def state(self) -> TrainerState:
        """Return the data position, torch's random state and, if kept, the optimizer's state."""
        state = {"batches": self._stream.state(), "random": torch.get_rng_state().numpy()}
        return state | {"optimizer": dump_states([self._optimizer])} if self._keeps else state

    def restore(self, state: TrainerState) -> None:
        """Restore a state; raises `ValueError` if it was saved with another trainer or other data."""
        if state.keys() != self.state().keys():
            raise ValueError("the state's arrays do not match this trainer's")
        self._stream.restore(state["batches"])
        if self._keeps:
            load_states([self._optimizer], state["optimizer"])
        torch.set_rng_state(torch.from_numpy(state["random"].copy()))


class HeldModule:
    """A module whose parameters are stored in a vector.

    On a CPU, the parameters are float32 views of the vector. On other devices, they are copied from
    the vector at the start of an assignment, and into the vector by `flush`.
    """

    def __init__(self, spec: ParameterSpec, module: nn.Module) -> None:
        self.module = module
        self._spec = spec
        self._tensors = exchanged_of(module)
        self.device = next(iter(self._tensors.values())).device
        """The device on which the module computes."""
        self.shares_memory = self.device.type == "cpu"
        self._copies = Copies()
        self._vector: Vector | None = None
        self._rounding: Rounding | None = None
        self._is_ahead = False
        """Whether steps have changed the module since the last copy to the vector."""

    def begin(self, vector: Vector) -> None:
        """Load the values of a vector."""
        arrays = self._spec.views(vector)
        if not self.shares_memory:
            self._copies.write(self._tensors, arrays)
            self._rounding = Rounding(vector, self._read) if rounds(self._tensors) else None
            self._is_ahead = False
        elif self._vector is not vector:
            for name, tensor in self._tensors.items():
                tensor.data = torch.from_numpy(arrays[name])
        self._vector = vector

    def note_step(self) -> None:
        """Record that a step has changed the module."""
        self._is_ahead = not self.shares_memory

    def flush(self) -> None:
        """Copy the parameters into the vector, unless they are views of it."""
        if self._is_ahead:
            assert self._vector is not None
            self._read(self._vector)
            if self._rounding is not None:
                self._rounding.undo(self._vector)
            self._is_ahead = False

    def _read(self, vector: Vector) -> None:
        self._copies.read(self._tensors, self._spec.views(vector))


class _NoneAlone(Batches):
    """Batches of at least two examples.

    If the last batch of an epoch would contain only one example, the previous batch passes its
    last example on to it.
    """

    def draw(self) -> npt.NDArray[np.int64]:
        """Return the indices of the next batch's examples."""
        chosen, left = super().draw(), self.per_epoch - self._next
        if left > 1:
            return chosen
        return chosen[:-1] if left else self._order[-2:]


def _stream(data: Dataset, batch_size: int, seed: int, *, norms: bool) -> Batches:
    """Return batches; with batch norms, each batch has at least two examples.

    With a `batch_size` of 2, this is not possible for an odd number of examples.
    """
    if not norms or batch_size < 3 or len(data) < batch_size or len(data) % batch_size != 1:
        return batches(data, batch_size, seed)
    return _NoneAlone(data, range(0, len(data), batch_size), seed)


def _has_norms(module: nn.Module) -> bool:
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())  # noqa: SLF001


def tensor_of(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Convert an array to a tensor on a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def returned(module: nn.Module, x: Features, device: torch.device) -> Any:
    """Call a module on examples; several inputs are passed by name."""
    if isinstance(x, Inputs):
        return module(**{name: tensor_of(array, device) for name, array in x.arrays.items()})
    return module(tensor_of(x, device))
