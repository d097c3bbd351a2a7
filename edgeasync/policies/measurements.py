"""Measurements of each device and of the whole fleet: scalars, in bounded number."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

import msgspec

T = TypeVar("T")

RECENT = 5
"""A device's step and communication times are medians of this many measurements: two outliers do not matter."""

EXAMPLES_RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a device's moving average of examples per second."""

LATENESS_MAX = 2.0
"""The most that `lateness` says. Late updates count for less: the model needs more of them, but not any number."""

DATA_MISMATCH_WINDOW = 8
"""How many of a device's losses are compared with as many before them."""

STALENESS_WEIGHT = 0.1
"""Weight of the newest update in the moving average of staleness."""

AGREEMENT_WEIGHT = 0.2
"""Weight of the newest version in the moving average of the agreement."""

WINDOW = 64
"""How many voters' newest reports are kept, and how many medians of them."""

QUARTER = WINDOW // 4
"""How many of these medians say what holds now."""

SETTLED = 0.2
"""Share of the first losses under which losses count as small, and their variation as noise."""

PEAK_SHARE = 0.3
"""Votes up to this share of the highest median count as usual, however low the others' are by now."""

DEVICES_MIN = 3
"""The least number of devices, or voters, to compare, the suspect included: of two, either may be wrong."""

DEVIATIONS_MAX = 8.0
"""A score that is further below the median than this many median deviations is not believed."""

DEVIATION_MIN = 0.05
"""The median deviation counts as at least this share of the median: voters may be very much alike."""

EXTRAPOLATION = 1.0 / 3.0
"""FedExP takes a half. With momentum that made the model of a small fleet of unlike devices restless."""

MEAN_SHARE_MIN = 1e-3
"""The squared length of a mean counts as at least this share of the updates' own: it may be 0."""


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value; several times as fast as the standard library's."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2.0


def median_of_recent(values: list[float], value: float) -> float:
    """Append a measurement to the last `RECENT`, and return their median."""
    values.append(value)
    if len(values) > RECENT:
        del values[0]
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2.0


def add_recent(values: list[T], value: T, count_max: int) -> None:
    """Append a value, and drop the oldest if there are then more than `count_max`.

    A deque would do this by itself, but cannot be encoded. The lists are short.
    """
    values.append(value)
    if len(values) > count_max:
        del values[0]


class Votes(msgspec.Struct, dict=True):
    """One number of each voter, the newest, of the `WINDOW` voters heard last; finite numbers only.

    A voter is a key or, without keys, a device id: a key that speaks under many names has one vote. Once somebody
    has asked for the median, the numbers are kept in order.
    """

    newest: dict[str, float] = {}

    def __post_init__(self) -> None:
        self._kept: list[float] | None = None

    def __len__(self) -> int:
        """Return how many voters have voted."""
        return len(self.newest)

    def cast(self, voter: str, value: float) -> None:
        """Put a number in the place of the voter's last one."""
        newest = self.newest
        before = newest.pop(voter, None)
        if before is None:
            self.admit(voter, value)
            return
        newest[voter] = value
        if (kept := self._kept) is not None:
            del kept[bisect_left(kept, before)]
            insort(kept, value)

    def admit(self, voter: str, value: float) -> None:
        """Take a voter's first number; forget that of the voter that was silent for longest if there are many."""
        newest = self.newest
        if len(newest) >= WINDOW:
            self.withdraw(next(iter(newest)))
        newest[voter] = value
        if self._kept is not None:
            insort(self._kept, value)

    def replace(self, voter: str, value: float) -> None:
        """Change a voter's number; the voter keeps its place among those heard last."""
        if (kept := self._kept) is not None:
            del kept[bisect_left(kept, self.newest[voter])]
            insort(kept, value)
        self.newest[voter] = value

    def has_turn(self, voter: str) -> bool:
        """Return whether the voter is not of the half that was cast last."""
        newest = self.newest
        return voter not in newest or voter in islice(newest, (len(newest) + 1) // 2)

    def withdraw(self, voter: str) -> None:
        """Forget a voter's number, if there is one."""
        before = self.newest.pop(voter, None)
        if before is not None and self._kept is not None:
            del self._kept[bisect_left(self._kept, before)]

    def clear(self) -> None:
        """Forget all numbers."""
        self.newest.clear()
        self._kept = None

    @property
    def ordered(self) -> list[float]:
        """The numbers in order."""
        return sorted(self.newest.values())

    @property
    def median(self) -> float:
        """The median of the numbers, NaN without any."""
        kept = self._kept
        if kept is None:
            kept = self._kept = self.ordered
        half = len(kept) // 2
        return (kept[half] + kept[~half]) / 2.0 if kept else math.nan

    @property
    def least_credible(self) -> float:
        """The number below which nobody is believed; minus infinity with fewer than three voters.

        It is as far below the median as `DEVIATIONS_MAX` times the median distance from the median.
        """
        if len(self.newest) < DEVICES_MIN:
            return -math.inf
        usual = median(self.newest.values())
        deviation = median([abs(value - usual) for value in self.newest.values()])
        return usual - DEVIATIONS_MAX * max(deviation, DEVIATION_MIN * abs(usual))

    @property
    def reached_by_most(self) -> float:
        """The highest number that more than half of the voters reach, NaN without any: half is no majority."""
        ordered = self.ordered
        return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


class VotesWithPeak(Votes, dict=True):
    """Votes, and the highest that their median has been.

    As a model learns, the updates of those whose data it knows get shorter and shorter. Those of a device whose
    data it does not know yet stay long, and are no fault. So what is usual never falls under a share of the peak.
    `firsts` has the first number of each voter: before there are enough to compare there is no median to note.
    """

    noted: float = 0.0
    firsts: dict[str, float] = {}

    def __post_init__(self) -> None:
        Votes.__post_init__(self)
        self._peak: float | None = None

    @property
    def peak(self) -> float:
        """The highest median so far, that of the first numbers included; 0 while too few voters are known."""
        peak = self._peak
        if peak is None:
            peak = 0.0
            if len(self.newest) >= DEVICES_MIN:
                peak = max(self.noted, median(self.firsts.values()) if self.firsts else 0.0)
            self._peak = peak
        return peak

    def admit(self, voter: str, value: float) -> None:
        """Take a voter's first number, which may change the peak."""
        firsts = self.firsts
        if len(firsts) >= WINDOW:
            del firsts[next(iter(firsts))]
        firsts[voter] = value
        Votes.admit(self, voter, value)
        self._peak = None

    def withdraw(self, voter: str) -> None:
        """Forget a voter's numbers, if there are any."""
        Votes.withdraw(self, voter)
        self.firsts.pop(voter, None)
        self._peak = None

    def note_peak(self) -> None:
        """Note the median if it is higher than any before; call this only when most voters have voted."""
        if self.newest:
            self.noted = max(self.noted, median(self.newest.values()))
        self._peak = None

    def clear(self) -> None:
        """Forget all votes, and the peak."""
        Votes.clear(self)
        self.firsts.clear()
        self.noted = 0.0
        self._peak = None

    def usual(self, slack: float = 0.0) -> float:
        """Return what nobody need explain; infinity while too few voters are known, or all votes are 0.

        With `slack`, from 0 to 1, it is at least this share of the peak.
        """
        if len(self.newest) < DEVICES_MIN:
            return math.inf
        return max(self.median, max(PEAK_SHARE, slack) * self.peak) or math.inf


class PastMedians:
    """The newest `WINDOW` medians of votes, in a durable list, and what follows from it.

    `usual` is the median of them all, and `newest` that of the last quarter; NaN before the first.
    """

    __slots__ = ("_ordered", "_ordered_newest", "_values", "newest", "usual")

    def __init__(self, values: list[float]) -> None:
        self._values = values
        self._ordered, self._ordered_newest = sorted(values), sorted(values[-QUARTER:])
        self.usual = self.newest = math.nan
        if values:
            self.usual, self.newest = median(self._ordered), median(self._ordered_newest)

    def add(self, value: float) -> None:
        """Append a median; drop the oldest if there are then more than `WINDOW`."""
        values, ordered, ordered_newest = self._values, self._ordered, self._ordered_newest
        values.append(value)
        insort(ordered, value)
        insort(ordered_newest, value)
        if len(values) > QUARTER:
            del ordered_newest[bisect_left(ordered_newest, values[-QUARTER - 1])]
        if len(values) > WINDOW:
            del ordered[bisect_left(ordered, values[0])], values[0]
        half, quarter = len(ordered) // 2, len(ordered_newest) // 2
        self.usual = (ordered[half] + ordered[~half]) / 2.0
        self.newest = (ordered_newest[quarter] + ordered_newest[~quarter]) / 2.0

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._ordered.clear()
        self._ordered_newest.clear()
        self.usual = self.newest = math.nan


class BaseLosses(msgspec.Struct, array_like=True):
    """What a device's newest updates told of the loss of the model that they were trained from.

    `recent` has the finite ones of the last `DATA_MISMATCH_WINDOW` updates, `before` those of as many before them.
    """

    recent: list[float] = []
    before: list[float] = []

    def observe(self, loss: float | None) -> None:
        """Record an update's."""
        if loss is None or not math.isfinite(loss):
            return
        if len(self.recent) >= DATA_MISMATCH_WINDOW:
            add_recent(self.before, self.recent[0], DATA_MISMATCH_WINDOW)
        add_recent(self.recent, loss, DATA_MISMATCH_WINDOW)

    @property
    def newest(self) -> float:
        """The median of the last few; NaN before the first."""
        return median(self.recent[-RECENT:]) if self.recent else math.nan

    @property
    def usual(self) -> tuple[float, float]:
        """The medians of `recent` and of `before`; NaN while there are too few to judge the device's data by."""
        if len(self.before) < DATA_MISMATCH_WINDOW:
            return math.nan, math.nan
        return median(self.recent), median(self.before)


class DeviceMeasurements(msgspec.Struct, array_like=True):
    """The measurements of one device; 0 before its first update.

    `examples` is the size of its data, `local_steps_max` its own limit (0: no limit). `step_s` is the time of a
    local step, `communication_s` the part of a cycle in which the device neither trained nor waited for a flush.
    `counted` says whether its last update counted, and `bound` which bound keeps its steps from the controller's
    aim. For its next `roused` updates it does not rest. The losses are `None`, and the score is NaN, if its last
    update did not tell them. `updated_s` is the core's time of its last update, 0 since it joined again.
    `period_s_min` is the least time from one exchange to the next that the day's bytes allow.

    >>> from edgeasync.policies import DeviceMeasurements
    >>> DeviceMeasurements(examples=600, step_s=0.01).step_s
    0.01
    """

    examples: int = 0
    local_steps_max: int = 0
    local_steps: int = 0
    assigned_steps: int = 0
    batch_examples: float = 0.0
    staleness: int = 0
    step_s: float = 0.0
    communication_s: float = 0.0
    examples_per_s: float = 0.0
    loss_mean: float | None = 0.0
    loss_variance: float | None = 0.0
    score: float = math.inf
    updates: int = 0
    counted: bool = False
    why: str = ""
    recent_step_s: list[float] = []
    recent_communication_s: list[float] = []
    bound: str = ""
    base_losses: BaseLosses = msgspec.field(default_factory=BaseLosses)
    updated_s: float = 0.0
    recent_period_s: list[float] = []
    period_s_min: float = 0.0
    roused: int = 0

    def observe_arrival(self, now_s: float) -> None:
        """Record the time since the device's last update."""
        if self.updated_s:
            add_recent(self.recent_period_s, now_s - self.updated_s, RECENT)
        self.updated_s = now_s

    def observe(
        self,
        *,
        local_steps: int,
        examples: int,
        step_s: float,
        loss_mean: float | None,
        loss_variance: float | None,
        score: float | None = None,
        base_loss: float | None = None,
        cycle_s: float | None = None,
        overlap_steps: int = 0,
    ) -> None:
        """Record an update's local steps and, if known, the time from its assignment to its arrival, `cycle_s`.

        `overlap_steps` of the local steps were taken before the assignment arrived.
        """
        # No step takes less than a nanosecond: a device that says so must not drive an average to infinity.
        step_s = max(step_s, 1e-9) if step_s > 0 else 0.0
        self.local_steps = local_steps
        self.batch_examples = examples / local_steps
        self.loss_mean = loss_mean
        self.loss_variance = loss_variance
        told = loss_mean if score is None else score
        if told is None:
            self.score = math.nan
        else:
            self.score = told if math.isfinite(told) else math.inf
        self.base_losses.observe(base_loss)
        self.updates += 1
        if step_s:
            self.step_s = median_of_recent(self.recent_step_s, step_s)
            rate = examples / (local_steps * step_s)
            share = EXAMPLES_RATE_WEIGHT if self.examples_per_s else 1.0
            self.examples_per_s += (rate - self.examples_per_s) * share
        if cycle_s is not None:
            communication_s = max(0.0, cycle_s - (local_steps - overlap_steps) * step_s)
            self.communication_s = median_of_recent(self.recent_communication_s, communication_s)

    @property
    def cycle_s(self) -> float:
        """Seconds from one exchange to the next with the steps last assigned, without the wait for a flush."""
        return self.communication_s + self.step_s * (self.assigned_steps or self.local_steps)

    @property
    def period_s(self) -> float:
        """The time between two exchanges as it was, the wait for a flush included; 0 before the second."""
        return median(self.recent_period_s) if self.recent_period_s else 0.0

    @property
    def communication_share(self) -> float:
        """The share of `cycle_s` that communication takes."""
        return self.communication_s / self.cycle_s if self.cycle_s else 0.0


class FleetMeasurements(msgspec.Struct, dict=True):
    """The measurements of all devices together; every voter has one vote in each of them.

    Losses, variances and scores that are finite must not be so large that the sum of two is not.
    `agreement` is a moving average of the mean cosine, from -1 to 1, between updates that were folded together;
    NaN until two have been. `lengths` has the norms of the voters' newest updates, `norms` those norms over the
    root of the local steps, `gradients` over the local steps; `base_losses` has the losses of the models that the
    updates were trained from.
    `losses` and `loss_variances` have past medians of `newest_losses` and `newest_variances`, one for each turn of
    a voter. Its next turn comes when half of the voters have had one: who speaks often has no more turns. There is
    none before more than half of the voters tell a loss. Variances count from a voter's second update on.
    `past_losses` and `past_variances` follow from these lists, and change with them.

    >>> from edgeasync.policies import FleetMeasurements
    >>> FleetMeasurements().staleness_mean
    0.0
    """

    staleness_mean: float = 0.0
    agreement: float = math.nan
    loss_first: float = 0.0
    losses_seen: int = 0
    losses: list[float] = []
    loss_variances: list[float] = []
    lengths: VotesWithPeak = msgspec.field(default_factory=VotesWithPeak)
    norms: VotesWithPeak = msgspec.field(default_factory=VotesWithPeak)
    gradients: VotesWithPeak = msgspec.field(default_factory=VotesWithPeak)
    scores: Votes = msgspec.field(default_factory=Votes)
    newest_losses: Votes = msgspec.field(default_factory=Votes)
    newest_variances: Votes = msgspec.field(default_factory=Votes)
    base_losses: VotesWithPeak = msgspec.field(default_factory=VotesWithPeak)

    def __post_init__(self) -> None:
        self.past_losses, self.past_variances = PastMedians(self.losses), PastMedians(self.loss_variances)

    def observe_norm(self, voter: str, norm: float, local_steps: int) -> None:
        """Record the norm of an update, also of one that does not count, if it is finite."""
        if not math.isfinite(norm):
            return
        self.lengths.cast(voter, norm)
        self.norms.cast(voter, norm / math.sqrt(local_steps))
        self.gradients.cast(voter, norm / local_steps)

    def note_peaks(self, voters_live: int) -> None:
        """Note the usual lengths and losses, if enough voters, and most of the live ones, have sent an update."""
        if len(self.lengths) >= DEVICES_MIN and 2 * len(self.lengths) > min(voters_live, WINDOW):
            for votes in (self.lengths, self.norms, self.gradients, self.base_losses):
                votes.note_peak()

    def observe_staleness(self, staleness: int) -> None:
        """Record how many versions an update that counts is behind."""
        self.staleness_mean += (staleness - self.staleness_mean) * STALENESS_WEIGHT

    def lateness(self, staleness: int) -> float:
        """Return how many times as far behind as usual an update is, from 1 to `LATENESS_MAX`."""
        if staleness <= self.staleness_mean:
            return 1.0
        return min(LATENESS_MAX, (1.0 + staleness) / (1.0 + self.staleness_mean))

    def observe_loss(
        self, voter: str, loss_mean: float | None, loss_variance: float | None, voters_live: int
    ) -> None:
        """Record a loss and its variance if both are finite."""
        if loss_mean is None or loss_variance is None:
            return
        if not (math.isfinite(loss_mean) and math.isfinite(loss_variance)):
            return
        losses, variances = self.newest_losses, self.newest_variances
        known = voter in variances.newest
        variances.cast(voter, loss_variance)
        if not losses.has_turn(voter):
            losses.replace(voter, loss_mean)
            return
        losses.cast(voter, loss_mean)
        told = 2 * len(losses.newest)
        if told <= voters_live and told <= WINDOW:
            return
        self.past_losses.add(losses.median)
        if known:  # the first local steps vary least, and the median keeps them until most voters have more
            self.past_variances.add(variances.median)
        self.losses_seen += 1
        if self.losses_seen <= QUARTER:
            self.loss_first = self.past_losses.usual

    def observe_base_loss(self, voter: str, loss: float) -> None:
        """Record a device's loss of the fleet's model if it is finite, also of an update that does not count."""
        if math.isfinite(loss):
            self.base_losses.cast(voter, loss)

    def observe_score(self, voter: str, score: float) -> None:
        """Record a score if it is finite."""
        if math.isfinite(score):
            self.scores.cast(voter, score)

    def observe_agreement(self, agreement: float) -> None:
        """Record the mean cosine between the updates of a version."""
        share = 1.0 if math.isnan(self.agreement) else AGREEMENT_WEIGHT
        previous = 0.0 if math.isnan(self.agreement) else self.agreement
        self.agreement = previous + (agreement - previous) * share

    def forget(self, *, keeps_lengths: bool = False) -> None:
        """Clear all reports after a rollback: they are of a model that is gone."""
        self.agreement = math.nan
        lengths = () if keeps_lengths else (self.lengths, self.norms, self.gradients)
        for votes in (*lengths, self.scores, self.newest_losses, self.newest_variances, self.base_losses):
            votes.clear()
        self.past_losses.clear()
        self.past_variances.clear()

    def withdraw(self, voter: str) -> None:
        """Forget what a voter that is gone said of the model; how long its updates were still holds."""
        for votes in (self.scores, self.newest_losses, self.newest_variances, self.base_losses):
            votes.withdraw(voter)

    def revoke(self, voter: str) -> None:
        """Forget all that a voter has said, the lengths of its updates, too."""
        self.withdraw(voter)
        for votes in (self.lengths, self.norms, self.gradients):
            votes.withdraw(voter)

    @property
    def score(self) -> float:
        """The median of the voters' scores; NaN before the first."""
        return self.scores.median

    @property
    def loss(self) -> float:
        """The voters' median loss, over the last quarter of the turns; NaN before the first loss."""
        return self.past_losses.newest if self.losses else self.newest_losses.median

    @property
    def loss_unlearnt(self) -> float:
        """The loss of what is not learnt yet: the fleet's first, or the median of what voters told at first.

        Where devices join one after the other, the fleet's first losses are of a model that has learnt the first
        device's data.
        """
        return max(self.loss_first, self.base_losses.peak)

    @property
    def settled(self) -> bool:
        """Whether the losses are small beside the first ones, so that their variation is noise."""
        return self.loss <= SETTLED * self.loss_unlearnt

    def extrapolation(self, voters: int) -> float:
        """Return the learning rate for the mean of this number of voters' updates; 0 if it is unknown.

        As in FedExP it is a share of the mean squared length of the updates over the squared length of their mean,
        here for updates of one length whose cosines have the mean `agreement`.
        """
        if math.isnan(self.agreement):
            return 0.0
        return EXTRAPOLATION / max(self.agreement + (1.0 - self.agreement) / voters, MEAN_SHARE_MIN)

    @property
    def loss_variance(self) -> float:
        """The voters' median variance, over the last quarter of the turns; NaN before the first."""
        return self.past_variances.newest if self.loss_variances else self.newest_variances.median


def agreement_of(norm_of_mean: float, norms: list[float], weights: list[float]) -> float | None:
    """Return the mean cosine between updates from the norm of their weighted sum; `None` for fewer than two.

    For vectors a_i: |sum a_i|^2 = sum |a_i|^2 + sum over pairs of 2 cos |a_i| |a_j|. If all pairs had the same
    cosine, it would follow from the norms alone. That one is returned.
    """
    lengths = [abs(weight) * norm for weight, norm in zip(weights, norms, strict=True)]
    total, squares = math.fsum(lengths), math.fsum(length * length for length in lengths)
    pairs = total * total - squares
    if pairs <= 1e-12 * squares or not math.isfinite(pairs) or not math.isfinite(norm_of_mean):
        return None
    return max(-1.0, min(1.0, (norm_of_mean * norm_of_mean - squares) / pairs))
