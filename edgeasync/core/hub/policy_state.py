"""The durable state of `PolicyEngine`, by the part that changes it."""

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
    """Who has no say in the next version.

    `spoken` has the live devices that sent an update since the last version, but one that does not count.
    `infrequent` has the live devices that no quorum waits for, and their votes.
    """

    spoken: dict[str, None] = {}
    infrequent: dict[str, float] = {}


class GatheringState(msgspec.Struct):
    """The updates that wait, and how many folds there were: since the last rollback, and before it.

    `measuring` has the norms and weights of a version's updates, until its fold reports the norm of their sum.
    """

    contributions: list[Contribution] = []
    folds: int = 0
    folds_before: int = 0
    measuring: dict[int, tuple[list[float], list[float]]] = {}


class WarmUpState(msgspec.Struct):
    """Whether the warm-up is over, and what is counted for that.

    `updates` counts the updates folded under this policy. `examples_seen` is a float because devices choose the
    summands: their sum as an integer could become too large to encode.
    """

    over: bool
    updates: int = 0
    examples_seen: float = 0.0


class SurveyState(msgspec.Struct):
    """What the last survey found; the next one is taken `due_in` updates from now.

    Since `loss_mark_updates` updates the fleet's loss has not differed from `loss_mark` by more than noise.
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

    `version_oldest` is the oldest base that counts: a rollback raises it. The counts of updates are those of the
    whole run.
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
