"""Counterparts of `torch.cuda`'s functions, and the choice of a model's device.

>>> from edgeasync.async_train import cuda
>>> cuda.is_available() == (cuda.device_count() > 0)
True
"""

import sys
from functools import cache
from typing import Any, Literal

from edgeasync import OnnxTrainer
from edgeasync.async_train.adapters import has_parameters, is_torch
from edgeasync.async_train.ignored import ignore
from edgeasync.errors import ConfigError

__all__ = ["device_count", "empty_cache", "is_available", "set_device", "synchronize"]


def is_available() -> bool:
    """Return whether torch (if already imported) or onnxruntime can use a GPU."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of GPUs that torch can use, or 1 if only onnxruntime can use a GPU."""
    return _torch_count() or int(_onnxruntime_starts())


def set_device(device: object) -> None:
    """Select torch's GPU.

    edgeasync's models always use the first GPU. If torch has no GPU, a warning is logged once.
    """
    if _torch_count():
        sys.modules["torch"].cuda.set_device(device)
    else:
        ignore("cuda.set_device", "only torch can choose among several GPUs", device=device)


def synchronize() -> None:
    """Wait until torch's GPU has finished its work; edgeasync's models are always synchronous."""
    if _torch_count():
        sys.modules["torch"].cuda.synchronize()


def empty_cache() -> None:
    """Free the GPU memory that torch caches."""
    if _torch_count():
        sys.modules["torch"].cuda.empty_cache()


def usable(device: object, model: Any, where: str) -> str:
    """Return the device for a model: `device`, or `"cpu"` if the model cannot use that GPU.

    The fallback is logged once. `None` means the model's current device, which is initially the
    CPU. Raises `ConfigError` if only torch supports the device, and the model is not a torch
    module.
    """
    if device is None:
        found = next(model.parameters()).device if is_torch(model) else getattr(model, "device", "cpu")
        return str(found)
    wanted = str(device)
    kind = wanted.partition(":")[0]
    if is_torch(model):
        if kind == "cuda" and not _torch_count():
            return _fall_back(where, "torch cannot use a GPU here; computing on the CPU", wanted)
        return wanted
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {wanted!r}; choose 'cpu' or 'cuda'. Only torch modules support other devices"
        )
    if kind == "cuda" and has_parameters(model):
        return _fall_back(where, "your own model chooses its device itself", wanted)
    if kind == "cuda" and not _onnxruntime_starts():
        why = "onnxruntime cannot use a GPU here; computing on the CPU (pip install 'edgeasync[gpu]' adds support)"
        return _fall_back(where, why, wanted)
    return wanted


def provider_of(device: str) -> Literal["cpu", "cuda"]:
    """Return the agent's execution provider for a device."""
    return "cuda" if device.startswith("cuda") else "cpu"


def _fall_back(where: str, why: str, device: str) -> str:
    ignore(where, why, device=device)
    return "cpu"


def _torch_count() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.device_count()) if torch is not None and torch.cuda.is_available() else 0


@cache
def _onnxruntime_starts() -> bool:
    """Return whether onnxruntime can start on a GPU. A driver or library may be missing."""
    return OnnxTrainer.starts_on("cuda")
