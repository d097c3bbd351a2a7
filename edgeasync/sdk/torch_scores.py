"""Checks whether a torch module's output suits its loss."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from edgeasync.errors import ConfigError
from edgeasync.scores import SCALES, are_bounded, drawn
from edgeasync.sdk.torch_modules import copy_of

Scores = Literal["classes", "answers", "logarithms", "probabilities"]
"""Kinds of scores: class scores, binary scores, log-probabilities, or probabilities."""

_TAKING: dict[object, Scores] = {
    nn.CrossEntropyLoss: "classes",
    nn.functional.cross_entropy: "classes",
    nn.BCEWithLogitsLoss: "answers",
    nn.MultiLabelSoftMarginLoss: "answers",
    nn.functional.binary_cross_entropy_with_logits: "answers",
    nn.NLLLoss: "logarithms",
    nn.functional.nll_loss: "logarithms",
    nn.BCELoss: "probabilities",
    nn.functional.binary_cross_entropy: "probabilities",
}

_APART_MAX = 0.05
"""Tolerance for the logarithm of summed probabilities, since some models add an epsilon."""

ROWS = 8
"""Number of examples for the check."""


def scores_of(loss: Any, *, whole_targets: bool) -> Scores | None:
    """Return the kind of scores that a torch loss expects; `None` as loss means cross entropy."""
    if loss is None:
        return "classes" if whole_targets else None
    loss = getattr(loss, "func", loss)  # for a functools.partial
    return _TAKING.get(loss if inspect.isroutine(loss) else type(loss))


def check_scores(module: nn.Module, returned: Callable[[nn.Module], Any], scores: Scores) -> None:
    """Raise `ConfigError` if a module's output does not suit its loss.

    Class scores, for example, must not be probabilities, and there must be at least two. `returned`
    calls the module on a few examples. A copy of the module runs in training mode, with random
    parameters from small to large. If the module itself raises an error, it is accepted, because
    training will report the error.
    """
    name = type(module).__name__
    own, runs = _runs(module, returned)
    if own is None:
        return
    if scores == "probabilities":
        if own.min() < 0 or own.max() > 1:
            raise ConfigError(
                f"{name} returns values outside 0 to 1, but the loss expects probabilities; pass the loss "
                "torch.nn.BCEWithLogitsLoss() to edgeasync.torch.model, which expects scores"
            )
        return
    if scores == "logarithms":
        if own.ndim == 1 or own.logsumexp(1).abs().max() > _APART_MAX:
            way = (
                "end the module with log_softmax instead of probabilities"
                if are_bounded(runs)
                else "pass the loss torch.nn.CrossEntropyLoss() to edgeasync.torch.model, which expects scores"
            )
            raise ConfigError(
                f"{name} returns values that are not log-probabilities, which the loss expects; {way}"
            )
        return
    if scores == "classes" and (own.ndim == 1 or own.shape[1] == 1):
        raise ConfigError(
            f"{name} returns shape {tuple(own.shape)}, one score per example, but cross entropy needs one score "
            "per class, because with a single score the loss is always 0; return one score per class, or pass "
            "the loss torch.nn.BCEWithLogitsLoss() to edgeasync.torch.model and use the labels 0 and 1"
        )
    if are_bounded(runs):
        instead = "return the scores" if scores == "classes" else "return the scores, or use torch.nn.BCELoss()"
        raise ConfigError(
            f"{name} always returns values between 0 and 1, as after a softmax or a sigmoid, but the loss expects "
            f"the scores before that; {instead}"
        )


def _runs(
    module: nn.Module, returned: Callable[[nn.Module], Any]
) -> tuple[Tensor | None, list["np.ndarray[Any, np.dtype[np.floating]]"]]:
    """Return the output with the module's own parameters, and outputs with random ones.

    Return `None` and an empty list if the module fails or does not return a tensor of floats.
    """
    tried, runs = copy_of(module).train(), []
    devices = {tensor.device for tensor in tried.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            own = returned(tried)
            if not isinstance(own, Tensor) or not own.is_floating_point() or not own.ndim:
                return None, []
            values = {name: tensor.float().cpu().numpy() for name, tensor in tried.named_parameters()}
            for number, scale in enumerate(SCALES):
                generator = np.random.Generator(np.random.PCG64(number))
                for name, tensor in tried.named_parameters():
                    tensor.copy_(torch.from_numpy(drawn(values[name], scale, generator)))
                runs.append(returned(tried).float().cpu().numpy())
        except Exception:  # noqa: BLE001 - training will report the error
            return None, []
    return own, runs
