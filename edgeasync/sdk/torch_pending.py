"""Detects tensors that a backward pass still needs, which an exchange must not change."""

import logging
from collections.abc import Iterable, Mapping
from operator import methodcaller

import torch
from torch import Tensor, nn

from edgeasync.sdk.torch_modules import listed

LOG = logging.getLogger("edgeasync.join")

STEPS_PENDING_MAX = 64
"""Number of consecutive steps with a pending backward pass after which older graphs are ignored."""

_USE_COUNT = methodcaller("_use_count")


class SavedTensors:
    """Detects which tensors autograd still needs for a backward pass.

    Until its backward pass has run, a graph refers to the tensors that it needs. Tensors of the
    optimizer that has just stepped are ignored, since torch refuses to run a backward pass over
    values that were changed in place.

    A graph whose backward pass never runs also refers to tensors. Therefore, more is ignored if
    tensors are pending after every one of many steps:

    - After `STEPS_PENDING_MAX` such steps, a graph no longer counts for a tensor whose optimizer
      has stepped since the graph was built.
    - After as many further such steps, the tensors that were pending after all of these steps are
      ignored.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._tensors = list(tensors.values())
        # Even after its backward pass, a graph refers to the accumulator, which refers to the
        # parameter. Storing the accumulator here keeps the parameter's use count constant.
        self._accumulators = [_accumulator_of(one) for one in self._tensors if one.requires_grad]
        self._owners = [_owners_of(name, tensors) for name in self._names]
        self._usual = [1 + one.requires_grad for one in self._tensors]
        self._steps = 0
        self._always: set[str] = set()
        self._ignored: set[str] = set()
        self._is_strict = True

    def pending(self, stepped: Iterable[Tensor]) -> str | None:
        """Return the name of a tensor that a backward pass still needs, or `None`.

        `stepped` contains the parameters of the optimizer that has just stepped.
        """
        counts = list(map(_USE_COUNT, self._tensors))
        if counts == self._usual:
            self._steps = 0
            return None
        ids = set(map(id, stepped))
        found: set[str] = set()
        for place, (name, owners, count) in enumerate(zip(self._names, self._owners, counts, strict=True)):
            if not owners.isdisjoint(ids):
                if not self._is_strict:
                    self._usual[place] = count
            elif count > self._usual[place] and name not in self._ignored:
                found.add(name)
        if not found:
            self._steps = 0
            return None
        self._always = self._always & found if self._steps else found
        self._steps += 1
        if self._steps < STEPS_PENDING_MAX:
            return min(found)
        self._steps = 0
        if self._is_strict:
            self._is_strict = False
            return min(found)
        self._ignored |= self._always or found
        LOG.warning(
            "exchanges change %s although a backward pass may still need it: one was pending after each of %d "
            "steps; if that pass runs, join without optimizer, so that the session tracks every optimizer's steps",
            listed(sorted(map(repr, self._always or found))), 2 * STEPS_PENDING_MAX,
        )  # fmt: skip
        return None


def _owners_of(name: str, tensors: Mapping[str, Tensor]) -> set[int]:
    """Return the ids of the parameters to which a tensor belongs.

    A parameter belongs to itself. A buffer belongs to the parameters of the nearest module.
    """
    if isinstance(tensors[name], nn.Parameter):
        return {id(tensors[name])}
    while name:
        name = name.rpartition(".")[0]
        prefix = f"{name}." if name else ""
        near = {key for key in tensors if key.startswith(prefix) and isinstance(tensors[key], nn.Parameter)}
        if near:
            return {id(tensors[key]) for key in near}
    return set()


def _accumulator_of(parameter: Tensor) -> object:
    """Return the autograd node that accumulates a parameter's gradient in all graphs."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]
