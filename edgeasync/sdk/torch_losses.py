"""The loss that a module is trained by: how targets fit it, and what it tells of the module's output."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import Tensor, nn

from edgeasync.errors import ConfigError, DataError

Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch, of what the module returns and of the targets."""

ELEMENTWISE: tuple[object, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss),
    *(nn.functional.binary_cross_entropy, nn.functional.binary_cross_entropy_with_logits),
)
"""Losses of values, each against one of the targets. If their shapes differ, torch may repeat both, unasked."""


class TorchLoss:
    """A loss of torch or of the user's own; without one cross entropy for whole targets, mean squared error else.

    Raises `ConfigError` for a loss of torch that is not the mean of a batch.
    """

    def __init__(self, given: Loss | None) -> None:
        named = getattr(given, "keywords", {}).get("reduction")  # of functools.partial
        if (named or getattr(given, "reduction", None)) in ("sum", "none"):
            raise ConfigError("the loss is no mean of a batch, by its reduction; give reduction='mean'")
        self.given = given
        self.takes_values = type(given) in ELEMENTWISE or given in ELEMENTWISE
        """Whether it compares values one by one, so that targets must have the shape of the output."""
        self.ignored_label: int | None = getattr(given, "ignore_index", None)
        function = getattr(given, "func", given)  # of functools.partial
        home = str((function if inspect.isroutine(function) else type(function)).__module__)
        self._is_known = given is None or home.startswith("torch.nn")

    def __call__(self, found: Any, y: Tensor) -> Tensor:
        """Return the mean loss; raises `ConfigError` and `DataError` for an output that it cannot take."""
        if self._is_known and not isinstance(found, Tensor):
            raise ConfigError(
                f"the module returns a {type(found).__name__}, and the loss takes one tensor; give "
                "edgeasync.torch.model a loss of your own, which takes what the module returns, and the targets"
            )
        if self.given is not None:
            return self.given(found, _fitted(found, y) if self.takes_values else y)
        if y.is_floating_point():
            return nn.functional.mse_loss(found, _fitted(found, y))
        return nn.functional.cross_entropy(found, y)

    def tells_classes(self, found: Any, y: npt.NDArray[Any]) -> bool:
        """Return whether the likeliest classes are those with the highest scores in the module's output."""
        return y.dtype.kind == "i" and (self._is_known or are_scores(found, y))


def _fitted(found: Any, y: Tensor) -> Tensor:
    """Return targets in the shape of the module's output: (n,) as (n, 1); raises `DataError` for another shape."""
    one, other = ([size for size in each.shape[1:] if size != 1] for each in (found, y))
    if one != other or len(found) != len(y):
        raise DataError(
            f"the module returns shape {tuple(found.shape)} for targets of shape {tuple(y.shape)}; give a value "
            "for each of the output's"
        )
    return y.reshape(found.shape)


def are_scores(found: Any, y: npt.NDArray[Any]) -> bool:
    """Return whether what a module returns is scores of classes for labels, or values for values."""
    if not isinstance(found, Tensor):
        return False
    shape = list(found.shape)
    if y.dtype.kind == "i" and (len(shape) < 2 or shape.pop(1) < 2):
        return False
    return [size for size in shape if size != 1] == [size for size in y.shape if size != 1]
