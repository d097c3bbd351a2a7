"""Finds the exchanged and frozen tensors of torch modules, and copies tensors and modules."""

import copy
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgeasync.errors import ConfigError
from edgeasync.parameters import Arrays, Parameter
from edgeasync.protocol.messages import Frozen
from edgeasync.training.frozen import PIECE, FrozenArray, frozen_checksum

LOG = logging.getLogger("edgeasync.join")


def dump_states(kept: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """Serialize the state dicts of optimizers and similar objects as an array of bytes."""
    content = io.BytesIO()
    torch.save([one.state_dict() for one in kept], content)
    return np.frombuffer(content.getvalue(), np.uint8)


def load_states(kept: Sequence[Any], content: npt.NDArray[np.uint8]) -> None:
    """Restore states that `dump_states` returned; raises `ValueError` if they do not fit."""
    try:
        states = torch.load(io.BytesIO(content.tobytes()), weights_only=True)
        for one, state in zip(kept, states, strict=True):
            one.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"the saved state cannot be restored: {error}") from error


def is_trained(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter that is trained."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join names for a message: the first `most` names, and the number of remaining names."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def check_alone() -> None:
    """Raise `ConfigError` if this process is in a torch process group with other processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} in a torch process group, and an exchange would "
            "change the model of this process only; train without a process group, and let each process join"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as `torch.compile` or `DataParallel`."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while True:
        inner = getattr(module, "_orig_mod", module.module if isinstance(module, parallel) else None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module, including the hooks of its parameters.

    Computed tensors, such as a pruned weight, are copied with their current values. Raises
    `ConfigError` if the module cannot be copied.
    """
    # torch does not copy computed tensors.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in (*vars(part).values(), *part._buffers.values())  # noqa: SLF001 - includes non-persistent ones
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        copied = copy.deepcopy(module, computed)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be copied ({first_line(error)}); pass it before its first forward"
        ) from error
    for (_, tensor), (_, other) in zip(module.named_parameters(), copied.named_parameters(), strict=True):
        for hook in (tensor._backward_hooks or {}).values():  # noqa: SLF001 - no public attribute
            other.register_hook(hook)
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            other.register_post_accumulate_grad_hook(hook)
    return copied


def training(module: nn.Module) -> nn.Module:
    """Set a module to training mode, and return it.

    If the module is already in training mode, its submodules keep their modes. For example, the
    norms of a fine-tuned backbone may stay in evaluation mode.
    """
    kept = [part for part in module.modules() if module.training and not part.training]
    module.train()
    for part in kept:
        part.training = False
    return module


def hooked(module: nn.Module) -> list[str]:
    """Return the names of parameters with gradient hooks."""
    return [
        name
        for name, tensor in module.named_parameters()
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
    ]


def first_line(error: Exception) -> str:
    """Return the first line of a torch error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, including frozen ones, and floating-point buffers, by name.

    The names are those in the unwrapped module. Buffers outside the state dict are skipped, because
    the module computes them. Raises `ConfigError` for a lazy module that has not processed a batch.
    """
    module = unwrapped(module)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    left_out = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001 - no public attribute
    }
    tensors |= {
        name: tensor
        for name, tensor in module.named_buffers()
        if tensor.is_floating_point() and name not in left_out
    }
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name!r} has no shape yet; call the module on one batch first")
        if tensor.is_complex() and tensor.requires_grad:
            raise ConfigError(f"{name!r} is complex; store its real and imaginary parts as two parameters")
        if (sharded := sys.modules.get("torch.distributed.tensor")) and isinstance(tensor, sharded.DTensor):
            raise ConfigError(
                f"{name!r} is sharded; join with a module whose parameters are whole in this process"
            )
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


def exchanged_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the exchanged tensors: trained parameters, then floating-point buffers."""
    found = {
        name: tensor
        for name, tensor in tensors_of(module).items()
        if is_trained(tensor) or not isinstance(tensor, nn.Parameter)
    }
    if not any(is_trained(tensor) for tensor in found.values()):
        raise ConfigError(f"{type(module).__name__} has no trainable parameters")
    for name, tensor in found.items():
        if not isinstance(tensor, nn.Parameter) and not tensor.isfinite().all():
            raise ConfigError(
                f"the buffer {name!r} contains values that are not finite, which cannot be averaged; register it "
                "with persistent=False, or use a boolean mask"
            )
    return found


def parameters_of(module: nn.Module) -> list[Parameter]:
    """Return names, shapes and roles of the exchanged tensors."""
    return [
        Parameter(name, tuple(tensor.shape), "trained" if is_trained(tensor) else "statistic")
        for name, tensor in exchanged_of(module).items()
    ]


def frozen_of(module: nn.Module) -> Frozen | None:
    """Return the checksum of a module's frozen tensors.

    Return `None` if the module has no frozen tensors, or if computing the checksum fails.
    """
    try:
        return frozen_checksum(
            "torch",
            [FrozenArray(name, tensor.shape, _pieces_of(tensor)) for name, tensor in _staying_in(module).items()],
        )
    except (NotImplementedError, RuntimeError, TypeError) as error:
        LOG.warning("cannot compare the frozen parameters with those of other devices: %s", error)
        return None


def _staying_in(module: nn.Module) -> dict[str, Tensor]:
    """Return frozen parameters, and persistent buffers that are not floating-point, such as masks.

    Buffers with a single value are skipped, because they are counters, as in batch norms.
    """
    found = {
        name: tensor
        for name, tensor in tensors_of(module).items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    for prefix, part in unwrapped(module).named_modules():
        for name, tensor in part._buffers.items():  # noqa: SLF001 - to check which are persistent
            if tensor is None or tensor.is_floating_point() or tensor.numel() < 2:
                continue
            if name not in part._non_persistent_buffers_set:  # noqa: SLF001
                found[f"{prefix}.{name}".removeprefix(".").replace("_orig_mod.", "")] = tensor
    return found


def _pieces_of(tensor: Tensor) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's values in pieces; floats are converted to float32."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError("a parameter is sharded over several processes")
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE].cpu()
        yield (piece.float() if piece.is_floating_point() else piece).numpy()


def rounds(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether any tensor is less precise than float32."""
    return any(tensor.dtype not in {torch.float32, torch.float64} for tensor in tensors.values())


def read_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy tensors into arrays."""
    with torch.no_grad():
        for name, array in arrays.items():
            torch.from_numpy(array).copy_(tensors[name])


def write_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy arrays into tensors."""
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(np.require(array, requirements=["C", "W"])))
