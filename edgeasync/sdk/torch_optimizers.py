"""Creates torch optimizers for copies of a module, from a function or from another optimizer."""

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn

from edgeasync.errors import ConfigError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def maker_of(optimizer: torch.optim.Optimizer | MakeOptimizer | None, module: nn.Module) -> MakeOptimizer:
    """Return a function that creates an optimizer for the parameters of a copy of `module`."""
    if optimizer is None:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _maker_like(optimizer, module)
    if not callable(optimizer):
        raise ConfigError(f"optimizer is {type(optimizer).__name__}; pass a torch.optim optimizer or a factory")
    return optimizer


def _maker_like(optimizer: torch.optim.Optimizer, module: nn.Module) -> MakeOptimizer:
    """Return a function that creates optimizers with the same groups and options as `optimizer`."""
    kind = type(optimizer)
    names = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
    places = {id(tensor): place for place, (_, tensor) in enumerate(names)}
    groups = []
    for group in optimizer.param_groups:
        trained = [tensor for tensor in group["params"] if tensor.requires_grad]
        if any(id(tensor) not in places for tensor in trained):
            raise ConfigError(
                f"optimizer has a parameter that {type(module).__name__} lacks; create it for this module"
            )
        own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append((own, [places[id(tensor)] for tensor in trained]))
    used = {place for _, members in groups for place in members}
    if left := [name for place, (name, _) in enumerate(names) if place not in used]:
        raise ConfigError(
            f"optimizer does not train {left[0]!r}; add it to the optimizer, or call requires_grad_(False)"
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
