"""The model that a hub holds."""

from collections.abc import Callable
from typing import Any

import msgspec

from edgeasync.config import to_table
from edgeasync.errors import AddressError, ConfigError
from edgeasync.net.address import check_bind
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import CodeModel, LocalTraining, ShippedModel, TrainingPlan


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a hub holds, and what it gives to the devices that join.

    - `initial` makes the first vector of the `spec`.
    - `shipped` is what devices are told to train: the command `edgeasync agent` makes its trainer from it and from
      the hub's `[local]` settings. If your agents make trainers of their own, leave it out.
    - `graph` is a serialized ONNX training graph for the devices, and `forward` the model that it was built from.
    - `frozen` is the checksum of the model's arrays that do not travel, if it has any. `[hub] frozen` says what
      happens to a device whose arrays differ.
    """

    spec: ParameterSpec
    initial: Callable[[], Vector]
    shipped: Model | ShippedModel | CodeModel | None = None
    graph: bytes | None = None
    forward: bytes | None = None
    frozen: Frozen | None = None

    def training(self, local: LocalTraining) -> dict[str, Any] | None:
        """Return the plan that devices are sent, if they are told what to train."""
        return None if self.shipped is None else to_table(TrainingPlan(model=self.shipped, local=local))

    def check(self, settings: RunSettings, evaluator: Evaluator | None) -> None:
        """Raise `AddressError` or `ConfigError` for what such a hub cannot do."""
        hub = settings.hub
        check_bind(hub.bind, insecure=hub.insecure or hub.keys is not None)
        if hub.keys is not None and hub.bind.startswith("inproc:"):
            raise AddressError(
                f"{hub.bind}: ZeroMQ does not encrypt within a process; leave out keys, or write tcp://"
            )
        if hub.knocking and hub.keys is None:
            raise ConfigError(
                "knocking (--knocking) needs keys (--keys): a hub without keys lets every device in, so none "
                "asks; give keys, or leave knocking out"
            )
        if self.spec.length > settings.limits.parameters_max:
            raise ConfigError(
                f"the model has {self.spec.length} parameters, over limits.parameters_max = "
                f"{settings.limits.parameters_max}; raise that limit"
            )
        if evaluator is None and hub.stop.accuracy is not None:
            raise ConfigError(
                "stop.accuracy needs held-out data to measure on: give Hub an evaluator, or leave it out"
            )
