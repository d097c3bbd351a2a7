"""The hub's judgement at work: what becomes of every update, and when. Part of `HubCore`; scalars only.

`Judge` holds what the policies, which are plain values, decide from: the updates that wait, what was measured of
the fleet, the alarms under way, the tempo. `HubCore` asks it and keeps the members, the versions and the wire.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from edgeasync.core.alarms import AlarmBoard, Change
from edgeasync.core.effects import Discard, Fold, HubEffect, Keep, Report, Restore
from edgeasync.core.events import Evaluated
from edgeasync.core.progress import Progress
from edgeasync.core.settings import StopCondition
from edgeasync.policies.aggregation import Aggregator, Contribution, Fleet
from edgeasync.policies.frequency import FrequencyController, Interval, Tempo
from edgeasync.policies.history import DeviceHistory, FleetHistory, agreement_of
from edgeasync.policies.monitor import COMPARED_MIN, HASTE, REDUCTION, Observation, Scope
from edgeasync.policies.policy import Judgement, folds_one_by_one
from edgeasync.policies.staleness import Staleness
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.messages import ModelVersion, Push, Rejected

VERSION_TIMES_MAX = 4096
"""Versions whose time is remembered; an older base is taken to be as old as the oldest of them."""

RECOVERED_AFTER_KEPT = 8
"""Versions kept in a row after which the learning rate that a rollback halved is doubled again."""

KEEP_EVERY_UPDATES = 32
"""Calm updates between two versions kept to return to; more in a large fleet."""


class Judge:
    """Weighs, gathers, plans, sets the tempo and watches. Deterministic; draws on nothing but what it is told."""

    def __init__(self, judgement: Judgement, version: ModelVersion, held_max: int, stop: StopCondition) -> None:
        self.judgement = judgement
        self.fleet = FleetHistory()
        self.tempo = Tempo()
        self.progress = Progress(judgement.plateau, stop)
        self.alarms = AlarmBoard(judgement.monitor.watch, judgement.monitor.calm_updates)
        self.rollbacks = 0
        self._lineage = version.lineage
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
        self._retune_in = self._members = 0
        self._score_best = math.inf
        self._examples_mean = 0.0
        self._examples_total = 0.0
        self._examples_seen = 0
        self._updates = 0
        self._calm_since_kept = self._kept_in_a_row = 0
        self._caution = 1.0
        """What rollbacks leave of the server's learning rate; it grows again while versions are kept."""
        self._counted: set[str] = set()
        """Devices whose updates have counted since the start, or since the last rollback."""
        self._first: list[Observation] | None = []
        """The first updates, and those after a rollback, until there are enough to compare them."""
        self._warm = judgement.warm_up is None

    def __len__(self) -> int:
        return len(self._contributions)

    # -- what holds now --------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over, or there was none."""
        return self._warm

    @property
    def aggregate(self) -> Aggregator:
        """The aggregator in force."""
        warm_up = self.judgement.warm_up
        return self.judgement.aggregate if self._warm or warm_up is None else warm_up.aggregate

    @property
    def frequency(self) -> FrequencyController:
        """The controller in force."""
        warm_up = self.judgement.warm_up
        return self.judgement.frequency if self._warm or warm_up is None else warm_up.frequency

    @property
    def may_keep_waiting(self) -> bool:
        """Whether devices may be waiting for a flush."""
        return self.judgement.aggregate.answer == "at_flush" or self.judgement.warm_up is not None

    @property
    def learning_rate_factor(self) -> float:
        """What plateaus and remedies leave of the server's learning rate."""
        reduced = REDUCTION if self.alarms.active("reduce_lr") else 1.0
        return self.progress.learning_rate_factor * self._caution * reduced

    def interval(self, history: DeviceHistory) -> Interval:
        """Set the device's next interval and note it in its history."""
        interval = self.frequency.interval(history, self.tempo)
        history.assigned_steps, history.why = interval.local_steps, interval.why
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
        if push.base.lineage != self._lineage:
            return Rejected("foreign_lineage")
        staleness = self._version - push.base.number
        if staleness < 0:
            return Rejected("future_version")
        history.staleness = staleness
        if push.base.number < self._version_oldest:
            return Rejected("rolled_back")
        if self._look(observation, "device", now_s, effects) or self._is_epidemic(now_s, devices_live, effects):
            return Rejected("rolled_back")
        if not math.isfinite(observation.norm):
            return Rejected("not_finite")
        if self.alarms.active("quarantine", observation.device_id):
            return Rejected("quarantined")
        age = Staleness(staleness, self._seconds_since(push.base.number, now_s), devices_live)
        weight = self.judgement.staleness(age)
        if weight is None:
            return Rejected("stale")
        if self._behind(history.score):
            self.fleet.observe_score(history.score)  # the mean of those that count alone would never rise again
            return Rejected("behind")
        self.fleet.observe_update(
            staleness=staleness,
            norm=observation.norm,
            local_steps=push.local_steps,
            loss_mean=push.loss_mean,
            loss_variance=push.loss_variance,
            score=history.score,
        )
        if self._look(observation, "fleet", now_s, effects) or self._look_again(observation, now_s, effects):
            return Rejected("rolled_back")
        return weight

    def add(self, contribution: Contribution) -> None:
        """Let a contribution wait."""
        self._contributions.append(contribution)
        self._refused.discard(contribution.device_id)
        self._counted.add(contribution.device_id)

    def refuse(self, device_id: str, rejected: Rejected) -> None:
        """Note that nobody need wait for a device: it has spoken, though its update does not count."""
        if rejected.reason in ("not_finite", "quarantined", "behind"):
            self._refused.add(device_id)

    def forget(self, device_id: str) -> None:
        """Drop what is noted of a device that is gone: its alarms, and that it has spoken."""
        self.alarms.forget(device_id)
        self._refused.discard(device_id)
        self._counted.discard(device_id)

    def due_s(self, now_s: float, devices_live: int) -> float | None:
        """Return when they are to be folded: now if there is no place for more, `None` if it is not known."""
        if not self._contributions:
            return None
        if len(self._contributions) >= self._held_max:
            return now_s
        return self.aggregate.flush_at_s(self._contributions, self._fleet(devices_live - len(self._refused)))

    def fold(self, now_s: float, devices_live: int, effects: list[HubEffect]) -> list[Contribution]:
        """Make the next version of all that wait; return what went into it."""
        contributions, self._contributions = self._contributions, []
        weights = self.aggregate.weights(contributions, self._fleet(devices_live))
        if self.judgement.take == "best":
            weights = _only_best(contributions, weights)
        norms = [contribution.norm for contribution in contributions]
        norm_bound = math.fsum(abs(weight) * norm for weight, norm in zip(weights, norms, strict=True))
        plan = plan_chain(
            self.judgement.optimizer,
            Conditions(norm_bound, self._folds, self.fleet.staleness_mean, self._folds_before),
        )
        self._folds += 1
        self._advance(now_s)
        measure = len(contributions) > 1 and not self.judgement.combine.robust
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

    def retune(self, histories: Sequence[DeviceHistory], members: int) -> None:
        """Look at the whole fleet; done once for every few updates, so that it costs each of them little."""
        self._members = members
        self._retune_in = max(1, members // 2)
        self._score_best = min((history.score for history in histories), default=math.inf)
        with_data = [history.examples for history in histories if history.examples]
        self._examples_total = float(sum(with_data))
        self._examples_mean = self._examples_total / len(with_data) if with_data else 0.0
        tempo = self.frequency.retune(
            self.tempo, self.fleet, [history for history in histories if history.updates]
        )
        haste = HASTE if self.alarms.active("increase_frequency") else 1.0
        self.tempo = Tempo(tempo.period_s, tempo.gain, haste, tempo.cause)

    def is_retune_due(self) -> bool:
        """Count an update; return whether it is time to `retune`."""
        self._retune_in -= 1
        return self._retune_in <= 0

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._version

    # -- inside ----------------------------------------------------------------------------------------------

    def _fleet(self, devices_live: int) -> Fleet:
        return Fleet(devices_live, self.tempo.period_s, self._examples_mean)

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
        """Return whether a device with this score is too far behind the others for its update to count."""
        usual = self.fleet.score
        if math.isnan(usual):
            return False
        limit = self.judgement.behind_max
        if limit is not None and score > limit * usual:
            return True
        if self.judgement.take == "best" and folds_one_by_one(self.aggregate):
            return score > self._score_best
        return self.judgement.take == "better" and score > usual

    def _count(self, contributions: Sequence[Contribution], effects: list[HubEffect]) -> None:
        """Count what was folded: for the warm-up, and for the version to return to."""
        self._updates += len(contributions)
        warm_up = self.judgement.warm_up
        if not self._warm and warm_up is not None:
            # Where no device says how much data it has, there are no epochs to wait for.
            epochs = self._examples_seen / self._examples_total if self._examples_total else math.inf
            done = self._updates >= warm_up.updates if warm_up.updates else epochs >= (warm_up.epochs or 0.0)
            if done:
                self._warm = True
                effects.append(Report("warm", detail=f"the warm-up is over after {self._updates} updates"))
        # What a device in quarantine sends does not reach the model.
        alarmed = any(alarm.remedy != "quarantine" for alarm in self.alarms)
        self._calm_since_kept = 0 if alarmed else self._calm_since_kept + len(contributions)
        # A device that learns from a spoilt version says so one exchange later.
        if self.judgement.monitor.rolls_back and self._calm_since_kept >= max(
            KEEP_EVERY_UPDATES, 2 * self._members
        ):
            self._calm_since_kept = 0
            self._kept_in_a_row += 1
            if self._kept_in_a_row % RECOVERED_AFTER_KEPT == 0:
                self._caution = min(1.0, self._caution / REDUCTION)
            effects.append(Keep())

    def count_examples(self, examples: int) -> None:
        """Count examples that were trained on, for a warm-up in epochs."""
        self._examples_seen += examples

    def _look(self, observation: Observation, scope: Scope, now_s: float, effects: list[HubEffect]) -> bool:
        """Let the watches of a scope see an update; return whether the hub went back to an earlier version."""
        changes = self.alarms.look(observation, self.fleet, scope)
        self._report(changes, effects)
        goes_back = any(change.begun and change.alarm.remedy == "rollback" for change in changes)
        if goes_back:
            self._roll_back(now_s, effects)
        return goes_back

    def _is_epidemic(self, now_s: float, devices_live: int, effects: list[HubEffect]) -> bool:
        """Go back if more than half of the devices fell into quarantine: then the model is at fault, not they."""
        devices = self._counted.intersection(
            alarm.device_id for alarm in self.alarms if alarm.remedy == "quarantine"
        )
        if not self.judgement.monitor.rolls_back or len(devices) < 2 or 2 * len(devices) <= devices_live:
            return False
        for device_id in devices:
            self.alarms.forget(device_id)
        detail = f"{len(devices)} of {devices_live} devices are in quarantine: the model is at fault"
        effects.append(Report("alarm", detail=f"{detail}; {_REMEDIES['rollback'][True]}"))
        self._roll_back(now_s, effects)
        return True

    def _look_again(self, observation: Observation, now_s: float, effects: list[HubEffect]) -> bool:
        """Look again at the first updates once they can be compared; go back if one of them is alarming."""
        if self._first is None:
            return False
        self._first.append(observation)
        if len(self._first) < COMPARED_MIN:
            return False
        first, self._first = self._first, None
        changes = [change for update in first for change in self.alarms.look(update, self.fleet, "device")]
        self._report(changes, effects)
        spoilt = any(change.begun and change.alarm.remedy == "quarantine" for change in changes)
        if not spoilt or not self.judgement.monitor.rolls_back:
            return False
        self._roll_back(now_s, effects)
        return True

    def _roll_back(self, now_s: float, effects: list[HubEffect]) -> None:
        """Return to the version that was kept; drop what waits and what is still being learnt from later ones."""
        effects += [Discard(contribution.handle) for contribution in self._contributions]
        self._contributions.clear()
        self.rollbacks += 1
        self.fleet.forget()
        self._first = []
        self._counted.clear()
        self._caution *= REDUCTION
        self._kept_in_a_row = 0
        self._advance(now_s)
        self._version_oldest = self._version
        self._folds_before += self._folds
        self._folds = 0
        self._calm_since_kept = 0
        effects.append(Restore(self._version))

    def _report(self, changes: Sequence[Change], effects: list[HubEffect]) -> None:
        for change in changes:
            alarm = change.alarm
            word, tense = ("alarm", "") if change.begun else ("calm", "over: ")
            detail = f"{tense}{alarm.cause}; {_REMEDIES[alarm.remedy][change.begun]}"
            effects.append(Report(word, alarm.device_id, detail))

    def describe(self) -> dict[str, Any]:
        """Return what the status says of the judgement (docs/wire.md)."""
        fleet, progress = self.fleet, self.progress
        return {
            "tempo": {
                "period_s": round(self.tempo.period_s, 6),
                "gain": round(self.tempo.gain, 3),
                "cause": self.tempo.cause if self.tempo.gain < 1.0 else "",
                "warming_up": not self._warm,
            },
            "fleet": {
                "staleness_mean": round(fleet.staleness_mean, 3),
                "agreement": _number(fleet.agreement),
                "loss": _number(fleet.loss),
                "loss_variance": _number(fleet.loss_variance),
            },
            "learning_rate_factor": self.learning_rate_factor,
            "rollbacks": self.rollbacks,
            "alarms": [
                {"device": alarm.device_id, "remedy": alarm.remedy, "cause": alarm.cause} for alarm in self.alarms
            ],
            "evaluation": _evaluation(progress.last),
            "best": _evaluation(progress.best),
        }

    def check(self, updates_applied: int) -> None:
        """Raise `AssertionError` where the counts contradict one another."""
        assert len(self._contributions) < self._held_max
        assert updates_applied >= self._updates
        assert len(self._measuring) <= self._version


_REMEDIES = {
    "alert": ("nothing was changed", "nothing is changed"),
    "increase_frequency": ("intervals are as before", "intervals are halved"),
    "reduce_lr": ("the server's learning rate is as before", "the server's learning rate is halved"),
    "rollback": (
        "the server's learning rate grows again as versions are kept",
        "back to the model kept while all was calm, at half the server's learning rate",
    ),
    "quarantine": ("its updates count again", "its updates do not count until they are calm again"),
}


def _number(value: float) -> float | None:
    """Return a number as JSON has it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _evaluation(evaluated: Evaluated | None) -> dict[str, Any] | None:
    if evaluated is None:
        return None
    return {"version": evaluated.number, "loss": _number(evaluated.loss), "accuracy": evaluated.accuracy}


def _only_best(contributions: Sequence[Contribution], weights: Sequence[float]) -> tuple[float, ...]:
    """Let only the update with the lowest score count, with the weight of all."""
    best = min(range(len(contributions)), key=lambda position: contributions[position].score)
    total = math.fsum(weights)
    return tuple(total if position == best else 0.0 for position in range(len(contributions)))
