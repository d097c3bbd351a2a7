"""Train one model across many unequal, unreliable devices, without waiting for the slowest.

The public API consists of these names, and of the modules in `_MODULES` and `_ADAPTERS`. Everything
else is private. A name is imported on first use, so that commands and devices import only what they
need.

    >>> import numpy as np
    >>> from edgeasync import Stop, nn, train
    >>> x = np.random.default_rng(0).normal(size=(200, 3))
    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> run = train(network, (x, x[:, 0] > 0), until=Stop(updates=40))
    >>> path = run.export("trained.onnx")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeasync.data.dataset import Dataset
    from edgeasync.errors import EdgeAsyncError
    from edgeasync.net.status import fetch_status
    from edgeasync.parameters import Parameter, ParameterSpec, Vector
    from edgeasync.policies.optimizers import SGD, Adam
    from edgeasync.policies.policy import Policy
    from edgeasync.sdk.agent import Agent
    from edgeasync.sdk.hub import Hub
    from edgeasync.sdk.joined_loop import join
    from edgeasync.sdk.peer import Peer
    from edgeasync.sdk.run import Run
    from edgeasync.sdk.stop import Stop
    from edgeasync.sdk.train import train, train_async
    from edgeasync.training.gradient_trainer import GradientTrainer
    from edgeasync.training.onnx_trainer import OnnxTrainer
    from edgeasync.training.trainer import StepResult, Trainer

_HOMES = {
    "SGD": "policies.optimizers",
    "Adam": "policies.optimizers",
    "Agent": "sdk.agent",
    "Dataset": "data.dataset",
    "EdgeAsyncError": "errors",
    "GradientTrainer": "training.gradient_trainer",
    "Hub": "sdk.hub",
    "OnnxTrainer": "training.onnx_trainer",
    "Parameter": "parameters",
    "ParameterSpec": "parameters",
    "Peer": "sdk.peer",
    "Policy": "policies.policy",
    "Run": "sdk.run",
    "StepResult": "training.trainer",
    "Stop": "sdk.stop",
    "Trainer": "training.trainer",
    "Vector": "parameters",
    "fetch_status": "net.status",
    "join": "sdk.joined_loop",
    "train": "sdk.train",
    "train_async": "sdk.train",
}
_MODULES = ("async_train", "callbacks", "data", "lora", "losses", "metrics", "networks", "nn", "policies")
_ADAPTERS = ("jax", "sklearn", "torch")
"""Modules for optional libraries, by the library's name."""

__all__ = [
    "SGD",
    "Adam",
    "Agent",
    "Dataset",
    "EdgeAsyncError",
    "GradientTrainer",
    "Hub",
    "OnnxTrainer",
    "Parameter",
    "ParameterSpec",
    "Peer",
    "Policy",
    "Run",
    "StepResult",
    "Stop",
    "Trainer",
    "Vector",
    "fetch_status",
    "join",
    "train",
    "train_async",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"edgeasync.{name}")
    if name in _ADAPTERS:
        try:
            return import_module(f"edgeasync.{name}")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ImportError(f"edgeasync.{name} needs {name}, which is not installed") from error
    if name not in _HOMES:
        from edgeasync.config import suggest  # noqa: PLC0415 - only needed for an unknown name

        advice = suggest(name, __dir__()) or "dir(edgeasync) lists all names"
        raise AttributeError(f"module 'edgeasync' has no attribute {name!r}; {advice}")
    return getattr(import_module(f"edgeasync.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *_ADAPTERS])
