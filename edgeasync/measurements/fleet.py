"""Measurements of the whole fleet, which are a bounded number of scalars."""

import math

import msgspec

from edgeasync.measurements.medians import QUARTER, WINDOW, PastMedians
from edgeasync.measurements.votes import DEVICES_MIN, Votes, VotesWithPeak

SLOWNESS_MAX = 4.0
"""Upper limit of `slowness`."""

STALENESS_WEIGHT = 0.1
"""Weight of the latest update in the moving average of staleness."""

AGREEMENT_WEIGHT = 0.2
"""Weight of the latest version in the moving average of the agreement."""

SETTLED = 0.2
"""Losses below this share of the first losses are small, and their variation is noise."""

EXTRAPOLATION = 1.0 / 3.0
"""A factor in FedExP's formula for the learning rate.

FedExP uses 1/2, but with momentum, this value made training unstable in small, diverse fleets.
"""

MEAN_SHARE_MIN = 1e-3
"""Minimum squared norm of a mean, as a share of the updates' mean squared norm.

The minimum prevents a division by 0.
"""


class FleetMeasurements(msgspec.Struct, dict=True):
    """The measurements of all devices together. Each voter has one vote in every measurement.

    Losses, variances and scores must be so small that the sum of any two is finite.

    - `agreement`: moving average of the mean cosine, from -1 to 1, between updates of one fold. It
      is NaN until two updates have been folded together.
    - `lengths`: norms of the voters' latest updates.
    - `norms`: `lengths` divided by the square root of the number of local steps.
    - `gradients`: `lengths` divided by the number of local steps.
    - `base_losses`: losses of the models that the updates were trained from.
    - `losses` and `loss_variances`: past medians of `newest_losses` and `newest_variances`,
      appended when a voter votes. A voter's next vote counts only after half of the voters have
      voted, so that frequent reports add no further medians. The lists are empty until more than
      half of the voters report a loss. Variances from a voter's first update are ignored.
    - `past_losses` and `past_variances`: objects that compute the medians of `losses` and
      `loss_variances`.

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
        """Record the norm of an update if it is finite, even if the hub does not use the update."""
        if not math.isfinite(norm):
            return
        self.lengths.cast(voter, norm)
        self.norms.cast(voter, norm / math.sqrt(local_steps))
        self.gradients.cast(voter, norm / local_steps)

    def note_peaks(self, voters_live: int) -> None:
        """Update the peaks of norms and losses if more than half of the live voters sent an update."""
        if len(self.lengths) >= DEVICES_MIN and 2 * len(self.lengths) > min(voters_live, WINDOW):
            for votes in (self.lengths, self.norms, self.gradients, self.base_losses):
                votes.note_peak()

    def observe_staleness(self, staleness: int) -> None:
        """Record the staleness of an update that the hub uses."""
        self.staleness_mean += (staleness - self.staleness_mean) * STALENESS_WEIGHT

    def slowness(self, staleness: int, local_steps: int) -> float:
        """Estimate how many updates it takes to learn a device's data, divided by the usual number.

        The result is from 1 to `SLOWNESS_MAX`. It is the larger of two ratios: the update's
        staleness divided by the usual staleness, and the usual number of local steps divided by the
        update's number.
        """
        slowness = max(1.0, (1.0 + staleness) / (1.0 + self.staleness_mean))
        per_step = self.gradients.median
        if per_step > 0.0:  # not before the first update
            slowness = max(slowness, self.lengths.median / per_step / local_steps)
        return min(SLOWNESS_MAX, slowness)

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
        if known:  # skip first updates, whose losses vary least and would bias the median
            self.past_variances.add(variances.median)
        self.losses_seen += 1
        if self.losses_seen <= QUARTER:
            self.loss_first = self.past_losses.usual

    def observe_base_loss(self, voter: str, loss: float) -> None:
        """Record the loss of the hub's model on a device's data, even if the update is rejected."""
        if math.isfinite(loss):
            self.base_losses.cast(voter, loss)

    def observe_score(self, voter: str, score: float) -> None:
        """Record a score if it is finite."""
        if math.isfinite(score):
            self.scores.cast(voter, score)

    def observe_agreement(self, agreement: float) -> None:
        """Record the mean cosine between the updates that were folded into a version."""
        share = 1.0 if math.isnan(self.agreement) else AGREEMENT_WEIGHT
        previous = 0.0 if math.isnan(self.agreement) else self.agreement
        self.agreement = previous + (agreement - previous) * share

    def forget(self, *, keeps_lengths: bool = False) -> None:
        """Clear all reports after a rollback, because they describe the discarded model."""
        self.agreement = math.nan
        lengths = () if keeps_lengths else (self.lengths, self.norms, self.gradients)
        for votes in (*lengths, self.scores, self.newest_losses, self.newest_variances, self.base_losses):
            votes.clear()
        self.past_losses.clear()
        self.past_variances.clear()

    def withdraw(self, voter: str) -> None:
        """Delete the reports of a voter that has left, but not the norms of its updates."""
        for votes in (self.scores, self.newest_losses, self.newest_variances, self.base_losses):
            votes.withdraw(voter)

    def revoke(self, voter: str) -> None:
        """Delete all reports of a voter, including the norms of its updates."""
        self.withdraw(voter)
        for votes in (self.lengths, self.norms, self.gradients):
            votes.withdraw(voter)

    @property
    def score(self) -> float:
        """The median of the voters' scores; NaN before the first score."""
        return self.scores.median

    @property
    def loss(self) -> float:
        """The median of the latest `QUARTER` medians in `losses`; NaN before the first loss."""
        return self.past_losses.newest if self.losses else self.newest_losses.median

    @property
    def loss_unlearnt(self) -> float:
        """The loss before training: the fleet's first loss or the peak of `base_losses`, if higher.

        If devices join one after another, the fleet's first losses were measured after the model
        had already learnt the first device's data.
        """
        return max(self.loss_first, self.base_losses.peak)

    @property
    def settled(self) -> bool:
        """Whether the losses are so small that their variation is noise."""
        return self.loss <= SETTLED * self.loss_unlearnt

    def extrapolation(self, voters: int) -> float:
        """Return the learning rate for the mean of the updates of `voters` voters; 0 if unknown.

        As in FedExP, it is the updates' mean squared norm, divided by the squared norm of their
        mean and multiplied by a constant. Unlike FedExP, this method assumes that all updates have
        the same norm and that their mean cosine is `agreement`.
        """
        if math.isnan(self.agreement):
            return 0.0
        return EXTRAPOLATION / max(self.agreement + (1.0 - self.agreement) / voters, MEAN_SHARE_MIN)

    @property
    def loss_variance(self) -> float:
        """The median of the latest `QUARTER` medians in `loss_variances`; NaN before the first."""
        return self.past_variances.newest if self.loss_variances else self.newest_variances.median


def agreement_of(norm_of_mean: float, norms: list[float], weights: list[float]) -> float | None:
    """Compute the mean cosine between updates from the norm of their weighted sum.

    Return `None` for fewer than two updates. For vectors a_i, |sum a_i|^2 = sum |a_i|^2 + sum over
    pairs of 2 cos |a_i| |a_j|. The result is the solution for the cosine if all pairs are assumed
    to have the same cosine.
    """
    lengths = [abs(weight) * norm for weight, norm in zip(weights, norms, strict=True)]
    total, squares = math.fsum(lengths), math.fsum(length * length for length in lengths)
    pairs = total * total - squares
    if pairs <= 1e-12 * squares or not math.isfinite(pairs) or not math.isfinite(norm_of_mean):
        return None
    return max(-1.0, min(1.0, (norm_of_mean * norm_of_mean - squares) / pairs))
