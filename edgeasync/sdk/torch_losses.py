"""The loss that trains a module, and the checks of targets and outputs for this loss."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import Tensor, nn

from edgeasync.errors import ConfigError, DataError

Loss = Callable[[Any, Tensor], Tensor]
"""A function that returns a batch's mean loss from the module's output and the targets."""

ELEMENTWISE: tuple[object, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss),
    *(nn.functional.binary_cross_entropy, nn.functional.binary_cross_entropy_with_logits),
)
"""Elementwise losses, for which torch may silently broadcast outputs and targets."""


class TorchLoss:
    """A torch loss, or the user's own loss.

    By default, the loss is cross entropy for integer targets, and mean squared error for other
    targets. Raises `ConfigError` for a torch loss that does not return the mean over a batch.
    """

    def __init__(self, given: Loss | None) -> None:
        named = getattr(given, "keywords", {}).get("reduction")  # for a functools.partial
        if (named or getattr(given, "reduction", None)) in ("sum", "none"):
            raise ConfigError("the loss does not return the mean of a batch; set reduction='mean'")
        self.given = given
        self.takes_values = type(given) in ELEMENTWISE or given in ELEMENTWISE
        """Whether the loss is elementwise, so that targets must have the shape of the output."""
        self.ignored_label: int | None = getattr(given, "ignore_index", None)
        function = getattr(given, "func", given)  # for a functools.partial
        home = str((function if inspect.isroutine(function) else type(function)).__module__)
        self._is_known = given is None or home.startswith("torch.nn")

    def __call__(self, found: Any, y: Tensor) -> Tensor:
        """Return the mean loss; raises `ConfigError` or `DataError` for an unsuitable output."""
        if self._is_known and not isinstance(found, Tensor):
            raise ConfigError(
                f"the module returns a {type(found).__name__}, but the loss expects one tensor; pass your own "
                "loss to edgeasync.torch.model, a function of the module's output and the targets"
            )
        if self.given is not None:
            return self.given(found, _fitted(found, y) if self.takes_values else y)
        if y.is_floating_point():
            return nn.functional.mse_loss(found, _fitted(found, y))
        return nn.functional.cross_entropy(found, y)

    def tells_classes(self, found: Any, y: npt.NDArray[Any]) -> bool:
        """Return whether the output has one score per class, so that the highest score predicts the class."""
        return y.dtype.kind == "i" and (self._is_known or are_scores(found, y))


def _fitted(found: Any, y: Tensor) -> Tensor:
    """Reshape targets to the output's shape, such as (n,) to (n, 1); raises `DataError`."""
    one, other = ([size for size in each.shape[1:] if size != 1] for each in (found, y))
    if one != other or len(found) != len(y):
        raise DataError(
            f"the module returns shape {tuple(found.shape)} for targets of shape {tuple(y.shape)}; use one target "
            "per output value"
        )
    return y.reshape(found.shape)


def are_scores(found: Any, y: npt.NDArray[Any]) -> bool:
    """Return whether an output is one tensor of scores, with a shape that fits the targets.

    Integer targets need at least two class scores per target.
    """
    if not isinstance(found, Tensor):
        return False
    shape = list(found.shape)
    if y.dtype.kind == "i" and (len(shape) < 2 or shape.pop(1) < 2):
        return False
    return [size for size in shape if size != 1] == [size for size in y.shape if size != 1]
