"""The hub's policies, which are small immutable values that TOML files select by their `kind`.

>>> from edgeasync import Policy
>>> from edgeasync.policies.aggregation import ImmediateAggregator
>>> from edgeasync.policies.frequency import FixedFrequency
>>> policy = Policy(aggregate=ImmediateAggregator(), frequency=FixedFrequency(local_steps=16))
>>> policy.frequency
FixedFrequency(local_steps=16)

To write your own policy, you need only the names below: the base class `Plugin`, the protocol of
each part of a policy, and the types of the arguments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeasync.measurements.device import DeviceMeasurements
    from edgeasync.measurements.fleet import FleetMeasurements
    from edgeasync.plugins import Codec, Plugin
    from edgeasync.policies.aggregation import Aggregator, Contribution, Fleet
    from edgeasync.policies.combining import Combiner, RowCombiner
    from edgeasync.policies.frequency import Cadence, FrequencyController, Interval
    from edgeasync.policies.monitor import Detector, Evidence, Observation
    from edgeasync.policies.staleness import Staleness, StalenessPolicy
    from edgeasync.policies.transforms import Conditions, Scaling, Transform

_HOMES = {
    "Aggregator": "policies.aggregation",
    "Cadence": "policies.frequency",
    "Codec": "plugins",
    "Combiner": "policies.combining",
    "Conditions": "policies.transforms",
    "Contribution": "policies.aggregation",
    "DeviceMeasurements": "measurements.device",
    "Evidence": "policies.monitor",
    "Fleet": "policies.aggregation",
    "FleetMeasurements": "measurements.fleet",
    "FrequencyController": "policies.frequency",
    "Interval": "policies.frequency",
    "Observation": "policies.monitor",
    "Plugin": "plugins",
    "RowCombiner": "policies.combining",
    "Scaling": "policies.transforms",
    "Staleness": "policies.staleness",
    "StalenessPolicy": "policies.staleness",
    "Transform": "policies.transforms",
    "Detector": "policies.monitor",
}

__all__ = [
    "Aggregator",
    "Cadence",
    "Codec",
    "Combiner",
    "Conditions",
    "Contribution",
    "Detector",
    "DeviceMeasurements",
    "Evidence",
    "Fleet",
    "FleetMeasurements",
    "FrequencyController",
    "Interval",
    "Observation",
    "Plugin",
    "RowCombiner",
    "Scaling",
    "Staleness",
    "StalenessPolicy",
    "Transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"edgeasync.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
