"""The durable state of `PolicyEngine`, one struct for each of its parts."""

import math

import msgspec

from edgeasync.core.hub.divergence import DivergenceState
from edgeasync.core.hub.evaluation_tracker import EvaluationState
from edgeasync.core.hub.lineage import Ancestry
from edgeasync.core.hub.rest import RestState
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.policies.aggregation import Contribution
from edgeasync.policies.frequency import Cadence


class ElectorateState(msgspec.Struct):
    """The devices for whose vote the next version does not wait.

    `spoken` lists the live devices whose update since the last version does not count. `infrequent`
    maps each infrequent live device to its share of a vote. No quorum waits for these devices.
    """

    spoken: dict[str, None] = {}
    infrequent: dict[str, float] = {}


class GatheringState(msgspec.Struct):
    """The buffered updates, and the numbers of folds since and before the last rollback.

    `measuring` maps a version to the norms and weights of its updates until the norm of their sum
    is known.
    """

    contributions: list[Contribution] = []
    folds: int = 0
    folds_before: int = 0
    measuring: dict[int, tuple[list[float], list[float]]] = {}


class WarmUpState(msgspec.Struct):
    """The progress of the warm-up.

    `updates` counts the updates folded under this policy. `examples_seen` is a sum of numbers that
    devices report. It is a float, because an integer sum could become too large to encode.
    """

    over: bool
    updates: int = 0
    examples_seen: float = 0.0


class SurveyState(msgspec.Struct):
    """The results of the last survey; the next survey is due after `due_in` updates.

    Since the update with the number `loss_mark_updates`, the fleet's loss has differed from
    `loss_mark` by no more than noise.
    """

    due_in: int = 0
    devices: int = 0
    score_best: float = math.inf
    examples_total: float = 0.0
    examples_median: float = 0.0
    loss_mark: float = math.inf
    loss_mark_updates: int = 0


class PolicyEngineState(msgspec.Struct):
    """All durable fields of `PolicyEngine`.

    `version_oldest` is the oldest version on which an update may be based; a rollback raises it.
    The counts of updates cover the whole run.
    """

    ancestry: Ancestry
    version: int
    version_oldest: int
    warm_up: WarmUpState
    fleet: FleetMeasurements = msgspec.field(default_factory=FleetMeasurements)
    electorate: ElectorateState = msgspec.field(default_factory=ElectorateState)
    gathering: GatheringState = msgspec.field(default_factory=GatheringState)
    survey: SurveyState = msgspec.field(default_factory=SurveyState)
    cadence: Cadence = Cadence()
    rest: RestState = msgspec.field(default_factory=RestState)
    evaluations: EvaluationState = msgspec.field(default_factory=EvaluationState)
    divergence: DivergenceState = msgspec.field(default_factory=DivergenceState)
    updates_applied: int = 0
    updates_rejected: int = 0
