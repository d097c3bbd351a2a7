"""edgeasync: train one model across many unequal, unreliable devices, without waiting for any of them.

The names below are the public face. Each is imported when it is first asked for, so that a command or a device
pays only for what it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings, Limits, Liveness, StopCondition
    from edgeasync.data.dataset import Dataset, batches
    from edgeasync.data.files import load
    from edgeasync.data.iterables import from_iterable
    from edgeasync.data.partition import dirichlet, iid
    from edgeasync.durable.identity import DeviceFolder, DeviceIdentity
    from edgeasync.errors import EdgeAsyncError
    from edgeasync.parameters import Parameter, ParameterSpec, Vector
    from edgeasync.policies.optimizers import SGD, Adam
    from edgeasync.policies.policy import Policy
    from edgeasync.runtime.agent import Agent
    from edgeasync.runtime.hub import Hub
    from edgeasync.runtime.model_file import load_model
    from edgeasync.runtime.status import fetch_status
    from edgeasync.sdk.run import Run
    from edgeasync.sdk.stop import Stop
    from edgeasync.sdk.train import train, train_async
    from edgeasync.training.onnx_trainer import OnnxTrainer
    from edgeasync.training.trainer import GradientTrainer, StepResult, Trainer

__all__ = [
    "SGD",
    "Adam",
    "Agent",
    "CodecSettings",
    "Dataset",
    "DeviceFolder",
    "DeviceIdentity",
    "EdgeAsyncError",
    "GradientTrainer",
    "Hub",
    "HubCoreSettings",
    "Limits",
    "Liveness",
    "OnnxTrainer",
    "Parameter",
    "ParameterSpec",
    "Policy",
    "Run",
    "StepResult",
    "Stop",
    "StopCondition",
    "Trainer",
    "Vector",
    "batches",
    "dirichlet",
    "fetch_status",
    "from_iterable",
    "iid",
    "load",
    "load_model",
    "train",
    "train_async",
]

_HOMES = {
    "core.hub.settings": ("CodecSettings", "HubCoreSettings", "Limits", "Liveness", "StopCondition"),
    "data.dataset": ("Dataset", "batches"),
    "data.files": ("load",),
    "data.iterables": ("from_iterable",),
    "data.partition": ("dirichlet", "iid"),
    "errors": ("EdgeAsyncError",),
    "parameters": ("Parameter", "ParameterSpec", "Vector"),
    "policies.policy": ("Policy",),
    "policies.optimizers": ("SGD", "Adam"),
    "runtime.agent": ("Agent",),
    "durable.identity": ("DeviceFolder", "DeviceIdentity"),
    "runtime.hub": ("Hub",),
    "runtime.model_file": ("load_model",),
    "runtime.status": ("fetch_status",),
    "sdk.run": ("Run",),
    "sdk.stop": ("Stop",),
    "sdk.train": ("train", "train_async"),
    "training.onnx_trainer": ("OnnxTrainer",),
    "training.trainer": ("GradientTrainer", "StepResult", "Trainer"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"edgeasync.{home}"), name)
    raise AttributeError(f"module 'edgeasync' has no attribute {name!r}")
