"""The model that a hub serves."""

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
    """The model of a hub, and what the hub sends to devices that join.

    - `initial` returns the initial vector of `spec`.
    - `shipped` is the model that devices train. `edgeasync agent` creates its trainer from this
      model and the hub's `[local]` settings. Omit it if your agents create their own trainers.
    - `graph` is a serialized ONNX training graph for the devices, and `forward` is the model that
      it was built from.
    - `frozen` is the checksum of the model's frozen arrays, if it has any. `[hub] frozen` defines
      how the hub treats a device with different frozen arrays.
    """

    spec: ParameterSpec
    initial: Callable[[], Vector]
    shipped: Model | ShippedModel | CodeModel | None = None
    graph: bytes | None = None
    forward: bytes | None = None
    frozen: Frozen | None = None

    def training(self, local: LocalTraining) -> dict[str, Any] | None:
        """Return the training plan for devices, or `None` if agents create their own trainers."""
        return None if self.shipped is None else to_table(TrainingPlan(model=self.shipped, local=local))

    def check(self, settings: RunSettings, evaluator: Evaluator | None) -> None:
        """Raise `AddressError` or `ConfigError` if the settings are incompatible with this model."""
        hub = settings.hub
        check_bind(hub.bind, insecure=hub.insecure or hub.keys is not None)
        if hub.keys is not None and hub.bind.startswith("inproc:"):
            raise AddressError(
                f"{hub.bind}: ZeroMQ does not encrypt within a process; remove keys, or bind to tcp://"
            )
        if hub.knocking and hub.keys is None:
            raise ConfigError(
                "knocking (--knocking) needs keys (--keys): a hub without keys admits every device; set keys, or "
                "remove knocking"
            )
        if self.spec.length > settings.limits.parameters_max:
            raise ConfigError(
                f"the model has {self.spec.length} parameters, more than limits.parameters_max = "
                f"{settings.limits.parameters_max}; increase that limit"
            )
        if evaluator is None and hub.stop.accuracy is not None:
            raise ConfigError(
                "stop.accuracy needs held-out data; pass an evaluator to Hub, or remove stop.accuracy"
            )
