"""Tracks the tensors of a module that a session exchanges, even if the loop replaces them."""

import logging
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from edgeasync.errors import ModelMismatchError
from edgeasync.sdk.torch_modules import is_trained, listed, parameters_of, tensors_of
from edgeasync.sdk.torch_pending import SavedTensors

LOG = logging.getLogger("edgeasync.join")

# Implemented in C for speed, because a session calls these after every step.
_VALUES = methodcaller("values")
_REQUIRES_GRAD, _SHAPE = attrgetter("requires_grad"), attrgetter("shape")


class Exchanged:
    """The exchanged tensors of a module, by name; `follow` updates this mapping to new tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = parameters_of(module)
        self.tensors: dict[str, Tensor] = {}
        self.trained: set[int] = set()
        """The ids of the trained tensors."""
        self._stale: set[str] = set()
        self._find()
        self._layout = ModuleLayout(module)

    def follow(self) -> set[str]:
        """Switch to the module's current tensors; return the names of replaced trained tensors.

        Raises `ModelMismatchError` if the tensors do not match those at `join` any more.
        """
        if not self._layout.has_changed():
            return set()
        before = self.tensors
        self._find()
        self._layout = ModuleLayout(self.module)
        return {
            name
            for name, tensor in self.tensors.items()
            if tensor is not before[name] and id(tensor) in self.trained
        }

    def _find(self) -> None:
        tensors = tensors_of(self.module)
        joined = {parameter.name: parameter for parameter in self.parameters}
        gone, resized = [], []
        for name, parameter in joined.items():
            if name in tensors and tuple(tensors[name].shape) == parameter.shape:
                continue
            if parameter.role == "statistic" and name in self.tensors:
                self._keep_buffer(name)
                tensors[name] = self.tensors[name]
            elif name in tensors:
                resized.append(f"{name!r} from {parameter.shape} to {tuple(tensors[name].shape)}")
            else:
                gone.append(repr(name))
        trained = {name for name, tensor in tensors.items() if is_trained(tensor)}
        added = [repr(name) for name in sorted(trained - joined.keys())]
        changes = {"missing": gone, "resized": resized, "newly trained": added}
        if told := [f"{what}: {listed(names)}" for what, names in changes.items() if names]:
            raise ModelMismatchError(
                f"the module has changed since it joined ({'; '.join(told)}), and a session exchanges only "
                "parameters that were trained at join; end the session, and join a hub whose model has these "
                "parameters"
            )
        self.tensors = {name: tensors[name] for name in joined}
        self.trained = {id(tensors[name]) for name, parameter in joined.items() if parameter.role == "trained"}
        self.saved = SavedTensors(self.tensors)

    def _keep_buffer(self, name: str) -> None:
        """Continue to exchange the last value of a buffer that was resized or removed."""
        if name not in self._stale:
            self._stale.add(name)
            LOG.warning("buffer %r was resized or removed; its last value is exchanged", name)


class ModuleLayout:
    """A snapshot of a module's submodules and tensors, and of which parameters require gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(_parts_of(module))
        self._sizes = list(map(len, self._parts))
        self._filled = list(filter(None, self._parts))
        self._values = list(self._look())
        self._parameters = list(module.parameters())
        self._details = self._look_closely()

    def has_changed(self) -> bool:
        """Return whether the module differs from the snapshot."""
        return (
            list(map(len, self._parts)) != self._sizes
            or not all(map(is_, self._look(), self._values))
            or self._look_closely() != self._details
        )

    def _look(self) -> Iterator[Any]:
        return chain.from_iterable(map(_VALUES, self._filled))

    def _look_closely(self) -> list[object]:
        return [*map(_REQUIRES_GRAD, self._parameters), *map(_SHAPE, self._parameters)]


def _parts_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    for part in module.modules():
        yield part._parameters  # noqa: SLF001 - no public attribute is fast enough for every step
        yield part._buffers  # noqa: SLF001
        yield part._modules  # noqa: SLF001
