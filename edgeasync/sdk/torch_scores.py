"""Whether what a torch module returns can be the scores that its loss takes."""

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
"""Scores of classes or of yes-or-no answers, logarithms of the probabilities of classes, or probabilities."""

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
"""The logarithm of the sum of an example's probabilities may be this far from 0, as some models add an epsilon."""

ROWS = 8
"""Examples that a module is tried with."""


def scores_of(loss: Any, *, whole_targets: bool) -> Scores | None:
    """Return what a loss of torch takes; without a loss it is cross entropy, for whole targets."""
    if loss is None:
        return "classes" if whole_targets else None
    loss = getattr(loss, "func", loss)  # of functools.partial
    return _TAKING.get(loss if inspect.isroutine(loss) else type(loss))


def check_scores(module: nn.Module, returned: Callable[[nn.Module], Any], scores: Scores) -> None:
    """Raise `ConfigError` if a module returns other values than its loss takes.

    Scores of classes are several, and scores are no probabilities.

    `returned` gives what a module returns for a few examples. A copy runs in training mode, with random parameters
    from small to large. A module that does not run so is left to training.
    """
    name = type(module).__name__
    own, runs = _runs(module, returned)
    if own is None:
        return
    if scores == "probabilities":
        if own.min() < 0 or own.max() > 1:
            raise ConfigError(
                f"{name} returns values that are not between 0 and 1, and the loss takes probabilities; give "
                "edgeasync.torch.model the loss torch.nn.BCEWithLogitsLoss(), which takes scores"
            )
        return
    if scores == "logarithms":
        if own.ndim == 1 or own.logsumexp(1).abs().max() > _APART_MAX:
            way = (
                "end in log_softmax in place of what makes probabilities"
                if are_bounded(runs)
                else "give edgeasync.torch.model the loss torch.nn.CrossEntropyLoss(), which takes scores"
            )
            raise ConfigError(
                f"{name} returns values that are no logarithms of probabilities, which the loss takes; {way}"
            )
        return
    if scores == "classes" and (own.ndim == 1 or own.shape[1] == 1):
        raise ConfigError(
            f"{name} returns shape {tuple(own.shape)}, one score for each example, and cross entropy needs one "
            "for each class (its loss would be 0 for ever); return one for each class, or give "
            "edgeasync.torch.model the loss torch.nn.BCEWithLogitsLoss(), with the labels 0 and 1"
        )
    if are_bounded(runs):
        instead = "return these" if scores == "classes" else "return these, or give it torch.nn.BCELoss()"
        raise ConfigError(
            f"{name} returns values between 0 and 1 whatever its parameters are, as a softmax or a sigmoid does, "
            f"and the loss takes the scores before that; {instead}"
        )


def _runs(
    module: nn.Module, returned: Callable[[nn.Module], Any]
) -> tuple[Tensor | None, list["np.ndarray[Any, np.dtype[np.floating]]"]]:
    """Return what a module returns with its own parameters, and then with others; nothing if it does not run."""
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
        except Exception:  # noqa: BLE001 - what is wrong with a module shows in training
            return None, []
    return own, runs
