"""The policies at work: what becomes of every update, and when. Part of `HubCore`; scalars only.

`PolicyEngine` holds what the policies, which are plain values, decide from: the updates that wait, what was
measured of the fleet, the alarms under way, the cadence. `HubCore` asks it, and keeps the members and the wire.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from edgeasync.core.hub.divergence import DivergenceGuard, DivergenceGuardState
from edgeasync.core.hub.effects import Discard, Fold, HubEffect, Keep, Report, Restore
from edgeasync.core.hub.evaluation_tracker import EvaluationTracker, EvaluationTrackerState
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.lineage import Ancestry
from edgeasync.core.hub.settings import StopCondition
from edgeasync.policies.aggregation import Aggregator, Contribution, Fleet
from edgeasync.policies.frequency import Cadence, FrequencyController, Interval
from edgeasync.policies.history import DeviceHistory, FleetHistory, agreement_of
from edgeasync.policies.monitor import STEPS_FACTOR, Observation
from edgeasync.policies.policy import PolicySet, folds_one_by_one
from edgeasync.policies.staleness import Staleness
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.messages import ModelVersion, Push, Rejected

VERSION_TIMES_MAX = 4096
"""Versions whose time is remembered; an older base is taken to be as old as the oldest of them."""


class PolicyEngineState(msgspec.Struct):
    """What is durable of `PolicyEngine`; sets in order."""

    ancestry: Ancestry
    fleet: FleetHistory
    cadence: Cadence
    evaluations: EvaluationTrackerState
    divergence: DivergenceGuardState
    contributions: list[Contribution]
    refused: list[str]
    folds: int
    folds_before: int
    version: int
    version_oldest: int
    version_times: list[float]
    measuring: dict[int, tuple[list[float], list[float]]]
    retune_in: int
    devices: int
    score_best: float
    examples_mean: float
    examples_total: float
    examples_seen: float
    updates: int
    warm: bool


class PolicyEngine:
    """Weighs, gathers, plans, sets the cadence and watches. Deterministic: it knows only what it is told."""

    def __init__(self, policy: PolicySet, version: ModelVersion, held_max: int, stop: StopCondition) -> None:
        self.policy = policy
        self.fleet = FleetHistory()
        self.cadence = Cadence()
        self.evaluations = EvaluationTracker(policy.plateau, stop)
        self.divergence = DivergenceGuard(policy.monitor)
        self.ancestry = Ancestry(version.lineage)
        self._held_max = held_max
        self._contributions: list[Contribution] = []
        self._refused: set[str] = set()
        """Live devices that have spoken since the last version, but whose updates do not count."""
        self._folds = self._folds_before = 0
        self._version_oldest = version.number
        """The oldest base that counts: updates learnt from a model that was rolled back do not."""
        self._version = version.number
        self._version_times: deque[float] = deque(maxlen=VERSION_TIMES_MAX)
        self._measuring: dict[int, tuple[list[float], list[float]]] = {}
        self._retune_in = self._devices = 0
        self._score_best = math.inf
        self._examples_mean = 0.0
        self._examples_total = 0.0
        self._examples_seen = 0.0
        """Not an integer: the devices say what is added, and no sum of it may be too large to write down."""
        self._updates = 0
        self._warm = policy.warm_up is None

    def __len__(self) -> int:
        return len(self._contributions)

    # -- what is durable -------------------------------------------------------------------------------------

    def dump_state(self) -> PolicyEngineState:
        """Return the durable state, to be written down at once: it is not a copy."""
        return PolicyEngineState(
            ancestry=self.ancestry,
            fleet=self.fleet,
            cadence=self.cadence,
            evaluations=self.evaluations.dump_state(),
            divergence=self.divergence.dump_state(),
            contributions=self._contributions,
            refused=sorted(self._refused),
            folds=self._folds,
            folds_before=self._folds_before,
            version=self._version,
            version_oldest=self._version_oldest,
            version_times=list(self._version_times),
            measuring=self._measuring,
            retune_in=self._retune_in,
            devices=self._devices,
            score_best=self._score_best,
            examples_mean=self._examples_mean,
            examples_total=self._examples_total,
            examples_seen=self._examples_seen,
            updates=self._updates,
            warm=self._warm,
        )

    def load_state(self, state: PolicyEngineState) -> None:
        """Go on from a durable state, which is this object's from then on."""
        self.ancestry = state.ancestry
        self.fleet = state.fleet
        self.cadence = state.cadence
        self.evaluations.load_state(state.evaluations)
        self.divergence.load_state(state.divergence)
        self._contributions = state.contributions
        self._refused = set(state.refused)
        self._folds = state.folds
        self._folds_before = state.folds_before
        self._version = state.version
        self._version_oldest = state.version_oldest
        self._version_times = deque(state.version_times, maxlen=VERSION_TIMES_MAX)
        self._measuring = state.measuring
        self._retune_in = state.retune_in
        self._devices = state.devices
        self._score_best = state.score_best
        self._examples_mean = state.examples_mean
        self._examples_total = state.examples_total
        self._examples_seen = state.examples_seen
        self._updates = state.updates
        self._warm = state.warm

    # -- what holds now --------------------------------------------------------------------------------------

    @property
    def handles(self) -> list[int]:
        """Handles of the updates that wait."""
        return [contribution.handle for contribution in self._contributions]

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over, or there was none."""
        return self._warm

    @property
    def aggregate(self) -> Aggregator:
        """The aggregator in force."""
        warm_up = self.policy.warm_up
        return self.policy.aggregate if self._warm or warm_up is None else warm_up.aggregate

    @property
    def frequency(self) -> FrequencyController:
        """The controller in force."""
        warm_up = self.policy.warm_up
        return self.policy.frequency if self._warm or warm_up is None else warm_up.frequency

    @property
    def may_keep_waiting(self) -> bool:
        """Whether devices may be waiting for a flush."""
        return self.policy.aggregate.answer == "at_flush" or self.policy.warm_up is not None

    @property
    def learning_rate_factor(self) -> float:
        """What plateaus and remedies leave of the server's learning rate."""
        return self.evaluations.learning_rate_factor * self.divergence.learning_rate_factor

    def interval(self, history: DeviceHistory) -> Interval:
        """Set the device's next interval and note it in its history."""
        steps_factor = STEPS_FACTOR if self.divergence.alarms.active("increase_frequency") else 1.0
        cadence = self.cadence
        if cadence.steps_factor != steps_factor:
            cadence = msgspec.structs.replace(cadence, steps_factor=steps_factor)
        interval = self.frequency.interval(history, cadence)
        history.assigned_steps, history.why = interval.local_steps, interval.why
        history.bound = interval.bound
        return interval

    # -- an update comes in ----------------------------------------------------------------------------------

    def weigh(
        self,
        push: Push,
        observation: Observation,
        history: DeviceHistory,
        effects: list[HubEffect],
        *,
        now_s: float,
        devices_live: int,
    ) -> float | Rejected:
        """Return how much an update counts, or why it never will; alarms may begin or end with it."""
        if not self.ancestry.knows(push.base):
            return Rejected("foreign_lineage")
        staleness = self._version - push.base.number
        if staleness < 0:
            return Rejected("future_version")
        history.staleness = staleness
        if push.base.number < self._version_oldest:
            return Rejected("rolled_back")
        if self.divergence.watch_device(observation, self.fleet, devices_live, effects):
            return self._roll_back(now_s, effects)
        if not math.isfinite(observation.norm):
            return Rejected("not_finite")
        if self.divergence.shuts_out(observation.device_id):
            return Rejected("quarantined")
        age = Staleness(staleness, self._seconds_since(push.base.number, now_s), devices_live)
        weight = self.policy.staleness(age)
        if weight is None:
            return Rejected("stale")
        if self._behind(history.score):
            self.fleet.observe_score(history.score)  # the median of those that count alone would never rise again
            return Rejected("behind")
        self.fleet.observe_update(
            observation.device_id,
            staleness=staleness,
            norm=observation.norm,
            local_steps=push.local_steps,
            loss_mean=push.loss_mean,
            loss_variance=push.loss_variance,
            score=history.score,
        )
        if self.divergence.watch_fleet(observation, self.fleet, effects):
            return self._roll_back(now_s, effects)
        return weight

    def add(self, contribution: Contribution) -> None:
        """Let a contribution wait."""
        self._contributions.append(contribution)
        self._refused.discard(contribution.device_id)
        self.divergence.count(contribution.device_id)

    def refuse(self, device_id: str, rejected: Rejected) -> None:
        """Note that nobody need wait for a device: it has spoken, though its update does not count."""
        if rejected.reason in ("not_finite", "quarantined", "behind"):
            self._refused.add(device_id)

    def forget(self, device_id: str) -> None:
        """Drop what is noted of a device that is gone: its alarms, and that it has spoken."""
        self.divergence.forget(device_id)
        self._refused.discard(device_id)

    def due_s(self, now_s: float, devices_live: int) -> float | None:
        """Return when they are to be folded: now if there is no place for more, `None` if it is not known."""
        if not self._contributions:
            return None
        if len(self._contributions) >= self._held_max:
            return now_s
        silent = self._refused.difference([contribution.device_id for contribution in self._contributions])
        return self.aggregate.flush_at_s(self._contributions, self._fleet(devices_live - len(silent)))

    def fold(self, now_s: float, devices_live: int, effects: list[HubEffect]) -> list[Contribution]:
        """Make the next version of all that wait; return what went into it."""
        contributions, self._contributions = self._contributions, []
        weights = self.aggregate.weights(contributions, self._fleet(devices_live))
        if self.policy.take == "best":
            weights = _only_best(contributions, weights)
        norms = [contribution.norm for contribution in contributions]
        norm_bound = math.fsum(abs(weight) * norm for weight, norm in zip(weights, norms, strict=True))
        plan = plan_chain(
            self.policy.optimizer,
            Conditions(norm_bound, self._folds, self.fleet.staleness_mean, self._folds_before),
        )
        self._folds += 1
        self._advance(now_s)
        measure = len(contributions) > 1 and not self.policy.combine.robust
        if measure:
            self._measuring[self._version] = (norms, list(weights))
        effects.append(
            Fold(
                number=self._version,
                handles=tuple([contribution.handle for contribution in contributions]),
                weights=weights,
                plan=plan,
                scale=self.learning_rate_factor,
                bases=tuple([contribution.base for contribution in contributions]),
                measure=measure,
            )
        )
        self._count(contributions, effects)
        return contributions

    def folded(self, number: int, norm: float) -> None:
        """Take in the norm of the weighted sum that made a version."""
        norms, weights = self._measuring.pop(number, ([], []))
        agreement = agreement_of(norm, norms, weights)
        if agreement is not None:
            self.fleet.observe_agreement(agreement)

    # -- the fleet -------------------------------------------------------------------------------------------

    def retune(self, histories: Sequence[DeviceHistory], devices_live: int) -> None:
        """Look at the whole fleet; done once for every few updates, so that it costs each of them little."""
        self._devices = devices_live
        self._retune_in = max(1, devices_live // 2)
        scores = [history.score for history in histories if history.counted]
        self._score_best = min((score for score in scores if not math.isnan(score)), default=math.inf)
        with_data = [history.examples for history in histories if history.examples]
        self._examples_total = float(sum(with_data))
        self._examples_mean = self._examples_total / len(with_data) if with_data else 0.0
        self.cadence = self.frequency.retune(
            self.cadence, self.fleet, [history for history in histories if history.updates]
        )

    def count_update(self) -> bool:
        """Count an update; return whether it is time to `retune`."""
        self._retune_in -= 1
        return self._retune_in <= 0

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._version

    # -- inside ----------------------------------------------------------------------------------------------

    def _fleet(self, devices_live: int) -> Fleet:
        return Fleet(devices_live, self.cadence.period_s, self._examples_mean)

    def _advance(self, now_s: float) -> None:
        self._version += 1
        self._refused.clear()
        self._version_times.append(now_s)

    def _seconds_since(self, base: int, now_s: float) -> float:
        """Return how long ago the version `base` stopped being the newest."""
        versions = self._version - base
        if versions <= 0 or not self._version_times:
            return 0.0
        return now_s - self._version_times[max(0, len(self._version_times) - versions)]

    def _behind(self, score: float) -> bool:
        """Return whether a device with this score is too far behind the others for its update to count.

        One that tells none, whose score is NaN, is not: nobody knows.
        """
        usual = self.fleet.score
        if math.isnan(usual):
            return False
        limit = self.policy.behind_max
        if limit is not None and score > usual + (limit - 1.0) * abs(usual):
            return True
        if self.policy.take == "best" and folds_one_by_one(self.aggregate):
            return score > self._score_best
        return self.policy.take == "better" and score > usual

    def _count(self, contributions: Sequence[Contribution], effects: list[HubEffect]) -> None:
        """Count what was folded: for the warm-up, and for the version to return to."""
        self._updates += len(contributions)
        warm_up = self.policy.warm_up
        if not self._warm and warm_up is not None:
            # Where no device says how much data it has, there are no epochs to wait for.
            epochs = self._examples_seen / self._examples_total if self._examples_total else math.inf
            done = self._updates >= warm_up.updates if warm_up.updates else epochs >= (warm_up.epochs or 0.0)
            if done:
                self._warm = True
                effects.append(Report("warm", detail=f"the warm-up is over after {self._updates} updates"))
        if self.divergence.count_folded(len(contributions), self._devices):
            effects.append(Keep())

    def count_examples(self, examples: int) -> None:
        """Count examples that were trained on, for a warm-up in epochs."""
        self._examples_seen += examples

    def _roll_back(self, now_s: float, effects: list[HubEffect]) -> Rejected:
        """Return to the version that was kept; drop what waits and what is still being learnt from later ones."""
        effects += [Discard(contribution.handle) for contribution in self._contributions]
        self._contributions.clear()
        self._measuring.clear()
        self.divergence.rolled_back()
        self.fleet.forget()
        self._advance(now_s)
        self._version_oldest = self._version
        self._folds_before += self._folds
        self._folds = 0
        effects.append(Restore(self._version))
        return Rejected("rolled_back")

    def describe(self, devices: Sequence[DeviceHistory] = ()) -> dict[str, Any]:
        """Return what the status says of the policies (docs/wire.md), and of the period of these devices.

        That is the one in force: bounds may keep the devices from what the controller aims at.
        """
        fleet, progress = self.fleet, self.evaluations
        measured = [device for device in devices if device.step_s]
        bounds = Counter(device.bound for device in measured if device.bound)
        bound = bounds.most_common(1)[0][0] if 2 * bounds.total() >= len(measured) > 0 else ""
        return {
            "tempo": {
                "period_s": round(statistics.median([d.cycle_s for d in measured]) if measured else 0.0, 6),
                "aim_s": round(self.cadence.period_s, 6),
                "bound": bound,
                "gain": round(self.cadence.gain, 3),
                "cause": self.cadence.cause if self.cadence.gain < 1.0 else "",
                "warming_up": not self._warm,
            },
            "fleet": {
                "staleness_mean": round(fleet.staleness_mean, 3),
                "agreement": _number(fleet.agreement),
                "loss": _number(fleet.loss),
                "loss_variance": _number(fleet.loss_variance),
            },
            "learning_rate_factor": self.learning_rate_factor,
            "rollbacks": self.divergence.rollbacks,
            "alarms": [
                {"device": alarm.device_id, "remedy": alarm.remedy, "cause": alarm.cause}
                for alarm in self.divergence.alarms
            ],
            "evaluation": _evaluation(progress.last),
            "best": _evaluation(progress.best),
        }

    def check(self, updates_applied: int) -> None:
        """Raise `AssertionError` where the counts contradict one another."""
        assert len(self._contributions) < self._held_max
        assert updates_applied >= self._updates
        assert len(self._measuring) <= self._version


def _number(value: float) -> float | None:
    """Return a number as JSON has it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _evaluation(evaluated: Evaluated | None) -> dict[str, Any] | None:
    if evaluated is None:
        return None
    return {"version": evaluated.number, "loss": _number(evaluated.loss), "accuracy": evaluated.accuracy}


def _only_best(contributions: Sequence[Contribution], weights: Sequence[float]) -> tuple[float, ...]:
    """Let only the update with the lowest score count, with the weight of all; all of them if none has a score."""
    scored = [position for position, one in enumerate(contributions) if not math.isnan(one.score)]
    if not scored:
        return tuple(weights)
    best = min(scored, key=lambda position: contributions[position].score)
    total = math.fsum(weights)
    return tuple(total if position == best else 0.0 for position in range(len(contributions)))
