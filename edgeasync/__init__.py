"""edgeasync: train one model across many unequal, unreliable devices, without waiting for any of them."""

from edgeasync.core.settings import HubCoreSettings, Limits, Liveness, StopCondition
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.files import load
from edgeasync.data.iterables import from_iterable
from edgeasync.data.partition import dirichlet, iid
from edgeasync.errors import EdgeAsyncError
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.files import DeviceFolder, DeviceIdentity, load_model
from edgeasync.runtime.hub import Hub
from edgeasync.runtime.local import train_locally
from edgeasync.runtime.status import fetch_status
from edgeasync.training.trainer import GradientTrainer, StepResult, Trainer

__all__ = [
    "Agent",
    "Dataset",
    "DeviceFolder",
    "DeviceIdentity",
    "EdgeAsyncError",
    "GradientTrainer",
    "Hub",
    "HubCoreSettings",
    "Limits",
    "Liveness",
    "Parameter",
    "ParameterSpec",
    "Policy",
    "StepResult",
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
    "train_locally",
]
