"""Losses for arrays and torch tensors. Each has a method `loss` that returns edgeasync's loss."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync import losses
from edgeasync.errors import ConfigError


class Loss(float):
    """The mean loss of a batch, as a float; `backward` adds its gradient to the model's gradients."""

    origin: Any = None

    def item(self) -> float:
        """Return the number."""
        return float(self)

    def backward(self) -> None:
        """Add the loss's gradient to the model's gradients, for the next `optimizer.step()`.

        Raises `ConfigError` unless the loss was computed directly from the scores of an edgeasync
        model in training mode.
        """
        if self.origin is None:
            raise ConfigError(
                "backward: these scores do not come directly from a model of async_train.nn in training mode; "
                "call loss_fn(model(inputs), targets), after model.train()"
            )
        model, inputs, targets, loss = self.origin
        model.backward(inputs, targets, loss)


class LossFunction:
    """A loss with the same name and arguments as torch's loss."""

    def __init__(self, loss: losses.Loss, **for_torch: object) -> None:
        self._loss = loss
        self._for_torch = for_torch

    def loss(self) -> losses.Loss:
        """Return the equivalent loss of `edgeasync.losses`."""
        return self._loss

    def __call__(self, scores: Any, targets: Any) -> Any:
        """Return the mean loss: a tensor if `scores` is a tensor, otherwise a `Loss`."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(scores, torch.Tensor):
            return self._of_tensors(torch, scores, targets)
        from edgeasync import networks  # noqa: PLC0415 - needs onnx

        found = Loss(networks.mean_loss(self._loss, scores, targets))
        origin = getattr(scores, "origin", None)
        if origin is not None:
            found.origin = (*origin, targets, self._loss)
        return found

    def _of_tensors(self, torch: Any, scores: Any, targets: Any) -> Any:
        arguments = {
            name: torch.tensor(value, dtype=scores.dtype, device=scores.device) if name == "weight" else value
            for name, value in self._for_torch.items()
        }
        if not isinstance(targets, torch.Tensor):
            targets = torch.from_numpy(np.ascontiguousarray(targets))
        targets = targets.to(scores.device)
        if not isinstance(self._loss, losses.CrossEntropy):
            targets = targets.to(scores.dtype).reshape(scores.shape)
        return getattr(torch.nn, type(self).__name__)(**arguments)(scores, targets)


class CrossEntropyLoss(LossFunction):
    """Softmax cross-entropy of raw scores against class numbers.

    >>> from edgeasync.async_train import nn
    >>> round(nn.CrossEntropyLoss()([[0.0, 0.0]], [1]), 4)
    0.6931
    """

    def __init__(
        self,
        weight: Sequence[float] | npt.NDArray[Any] | None = None,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.ignore_index = ignore_index  # same name as in torch
        weights = None if weight is None else tuple(map(float, weight))
        given = {"weight": weights, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        loss = losses.CrossEntropy(
            class_weights=weights, ignored_label=ignore_index, label_smoothing=label_smoothing
        )
        super().__init__(loss, **{name: value for name, value in given.items() if value is not None})


class MSELoss(LossFunction):
    """Mean squared error."""

    def __init__(self) -> None:
        super().__init__(losses.MeanSquaredError())


class L1Loss(LossFunction):
    """Mean absolute error."""

    def __init__(self) -> None:
        super().__init__(losses.MeanAbsoluteError())


class HuberLoss(LossFunction):
    """Half the squared difference; differences above `delta` are penalized linearly."""

    def __init__(self, *, delta: float = 1.0) -> None:
        super().__init__(losses.Huber(delta=delta), delta=delta)


class BCEWithLogitsLoss(LossFunction):
    """Binary cross-entropy of independent raw scores, before a sigmoid."""

    def __init__(self) -> None:
        super().__init__(losses.BinaryCrossEntropy())


def loss_of(loss_fn: object) -> losses.LossSetting:
    """Convert a loss of this module to edgeasync's; names and edgeasync's losses stay unchanged.

    >>> from edgeasync.async_train import nn
    >>> from edgeasync.async_train.loss_functions import loss_of
    >>> loss_of(nn.MSELoss())
    MeanSquaredError()
    """
    if isinstance(loss_fn, LossFunction):
        return loss_fn.loss()
    if loss_fn is None:
        return "cross_entropy"
    if isinstance(loss_fn, str) or type(loss_fn).__module__ == losses.__name__:
        return loss_fn  # type: ignore[return-value]  # checked by train
    raise ConfigError(
        f"loss_fn is {type(loss_fn).__name__}; for a model that is not a torch module use a loss of "
        "async_train.nn, such as nn.CrossEntropyLoss(), or of edgeasync.losses"
    )
