"""The built-in kinds of each part of a policy, except those in `TransformKind` and `DetectorKind`."""

from edgeasync.config import Kinds, declare_kinds
from edgeasync.plugins import POLICIES, find_policy, installed, is_plugin
from edgeasync.policies.aggregation import (
    Aggregator,
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import (
    CentredClipCombiner,
    Combiner,
    MeanCombiner,
    MedianCombiner,
    TrimmedMeanCombiner,
)
from edgeasync.policies.frequency import AdaptiveFrequency, FixedFrequency, FrequencyController, TimeFrequency
from edgeasync.policies.monitor import Detector, DetectorKind
from edgeasync.policies.optimizers import TransformKind
from edgeasync.policies.staleness import (
    AdaptiveLearningRate,
    ConstantStaleness,
    PolynomialStaleness,
    StalenessPolicy,
)
from edgeasync.policies.transforms import Transform

StalenessKind = ConstantStaleness | AdaptiveLearningRate | PolynomialStaleness
AggregatorKind = (
    ImmediateAggregator | ModelAverageAggregator | BufferedAggregator | QuorumAggregator | SynchronousAggregator
)
CombinerKind = MeanCombiner | MedianCombiner | TrimmedMeanCombiner | CentredClipCombiner
FrequencyKind = FixedFrequency | TimeFrequency | AdaptiveFrequency

OWN = {
    StalenessPolicy: StalenessKind,
    Aggregator: AggregatorKind,
    Combiner: CombinerKind,
    FrequencyController: FrequencyKind,
    Transform: TransformKind,
    Detector: DetectorKind,
}
"""The built-in kinds of each part, keyed by the part's protocol."""

for _protocol, _own in OWN.items():
    declare_kinds(_protocol, Kinds(_own, find_policy, lambda: installed(POLICIES)))


def plugins_named(table: object) -> list[str]:
    """Return the distinct names of plugins in a `[policy]` table, without importing the plugins."""
    inside = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
    found = [name for part in inside for name in plugins_named(part)]
    kind = table.get("kind") if isinstance(table, dict) else None
    return list(dict.fromkeys([kind, *found] if isinstance(kind, str) and is_plugin(kind) else found))
