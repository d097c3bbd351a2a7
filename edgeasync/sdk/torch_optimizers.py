"""Optimizers of torch for copies of a module: made by a function, or like one that was given."""

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn

from edgeasync.errors import ConfigError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def maker_of(optimizer: torch.optim.Optimizer | MakeOptimizer | None, module: nn.Module) -> MakeOptimizer:
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
