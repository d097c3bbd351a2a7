"""When a fleet idles: as training plateaus, devices exchange less often.

The exchange period is a share of the plateau's duration. If training resumes after a plateau, the
fleet has therefore lost at most that share of the plateau's duration. A trained fleet makes few
exchanges, however long it runs.
"""

import math

import msgspec

from edgeasync.measurements.device import BaseLosses
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.measurements.votes import Votes

SHARE = 0.25
"""The exchange period of an idle fleet, as a share of the plateau's duration."""

PATIENCE_PERIODS = 30.0
PATIENCE_PERIODS_MAX = 100.0
PATIENCE_S = 300.0
"""A fleet goes idle after a plateau of 30 normal periods, or up to 100 that fit into this time."""

JUDGED_MIN = 5
"""The minimum number of checks of the model before the fleet goes idle."""

BETTER_SHARE = 0.01
BETTER_SHARE_FIRST = 0.001
"""A loss is better if it is lower by these shares of the best loss and of the first loss."""

BETTER_ACCURACY = 0.001

MUCH_BETTER = 10.0
"""From this multiple of the minimum improvement on, the normal pace returns immediately."""

KEPT = 1.0 / 3.0
"""The factor by which a small improvement shortens the plateau's duration."""

RISE_SHARE = 0.1
"""A loss has risen if it exceeds the worst since the last improvement by this share of the
progress.
"""

NEWS_SHARE = 0.5
"""A new voter's losses wake the fleet at this share of such a rise, but only once."""

NEW_UPDATES = 3
"""The hub checks a new voter's losses once, at its update with this number."""

MEASURED_UPDATES = 5
"""A device does not idle before it has sent this many updates."""

ROUSED_UPDATES = 8
"""A device whose own loss has risen does not idle for this many updates."""

AGREEMENT_STILL = 0.1
"""Without reported losses, training has plateaued while the updates' mean cosine is at most this.
"""

KNOWN_MAX = 4096
"""Maximum number of stored voters that no longer count as new."""


class Track(msgspec.Struct):
    """A loss over time: the first, the best, and the worst since the last improvement."""

    first: float = math.nan
    best: float = math.inf
    worst: float = -math.inf

    def improvement(self, loss: float) -> float:
        """Return an improvement as a multiple of the minimum one; 0 if it is smaller."""
        if math.isnan(self.first):
            return math.inf
        least = max(BETTER_SHARE * abs(self.best), BETTER_SHARE_FIRST * abs(self.first), 1e-12)
        times = (self.best - loss) / least
        return times if times >= 1.0 else 0.0

    def note(self, loss: float, worse: float, *, better: bool) -> None:
        """Record a loss and its upper estimate `worse`; `better` sets a new reference."""
        if math.isnan(self.first):
            self.first = loss
        if better:
            self.best, self.worst = loss, worse
        else:
            self.worst = max(self.worst, worse)

    def has_risen(self, loss: float, share: float = 1.0) -> bool:
        """Return whether a loss exceeds the worst one by `share` of a rise."""
        rise = share * max(self.learnt, self.worst - self.best)
        return not math.isnan(self.first) and loss > self.worst + rise

    @property
    def learnt(self) -> float:
        """`RISE_SHARE` of the loss's decrease, or of its best value if that is larger."""
        return RISE_SHARE * max(abs(self.first - self.best), abs(self.best))


class RestState(msgspec.Struct):
    """The durable fields of `Rest`.

    - `since_s` is when the model last improved, or there was news.
    - `judged_s` is when it was last checked; `judged` counts the checks since `since_s`.
    - `evaluated` tracks the losses of evaluations, `told` those that most voters reach, and
      `told_by_half` those that at least half of them reach.
    - `known` lists the voters whose first losses were checked.
    - `cause` is why the fleet last returned to its normal pace.
    """

    since_s: float = 0.0
    judged_s: float = 0.0
    judged: int = 0
    accuracy_best: float = -math.inf
    evaluated: Track = msgspec.field(default_factory=Track)
    told: Track = msgspec.field(default_factory=Track)
    told_by_half: Track = msgspec.field(default_factory=Track)
    known: dict[str, None] = {}
    cause: str = ""
    resting: bool = False


class Rest:
    """Detects a plateau of training, and computes the exchange period. Deterministic."""

    def __init__(self) -> None:
        self.state = RestState()

    # -- checks of the model ---------------------------------------------------------------------------------

    def evaluated(self, loss: float, accuracy: float | None, now_s: float, pace_s: float) -> bool:
        """Check the model by a held-out evaluation; return whether to wake the fleet."""
        state = self.state
        if not math.isfinite(loss):
            return False
        times = state.evaluated.improvement(loss)
        if accuracy is not None:
            gain = accuracy - state.accuracy_best
            if gain >= BETTER_ACCURACY:
                times = max(times, gain / BETTER_ACCURACY)
                state.accuracy_best = accuracy
        risen = state.evaluated.has_risen(loss)
        state.evaluated.note(loss, loss, better=risen or (times > 0.0 and loss <= state.evaluated.best))
        if risen:
            return self.wake(f"the held-out loss rose to {loss:.3g}", now_s)
        return self._judge(times, "the evaluation on held-out data improved", now_s, pace_s)

    def told(self, losses: Votes, voters_live: int, now_s: float, pace_s: float, *, judges: bool) -> bool:
        """Check the model by the voters' losses; return whether to wake the fleet.

        More than half of the voters must report a loss. The model is better once most voters reach
        a lower loss, and worse once most have a higher one, so a single key cannot decide either.
        Without `judges`, only a worse model counts.
        """
        ordered = losses.ordered
        if 2 * len(ordered) <= min(voters_live, WINDOW):
            return False
        most_reach, most_have = ordered[len(ordered) // 2], ordered[(len(ordered) - 1) // 2]
        track = self.state.told
        if track.has_risen(most_have):
            track.note(most_reach, most_have, better=True)
            self.state.told_by_half.note(most_have, most_have, better=True)
            return self.wake(f"the devices' losses rose to {most_have:.3g}", now_s)
        times = track.improvement(most_reach)
        track.note(most_reach, most_have, better=times > 0.0)
        half = self.state.told_by_half
        times_by_half = half.improvement(most_have)
        half.note(most_have, most_have, better=times_by_half > 0.0)
        if times_by_half and not times:
            times = 1.0  # the loss of one of two voters fell: shorten the period, but do not wake the fleet
        return judges and self._judge(times, "the devices' losses fell", now_s, pace_s)

    def moved(self, agreement: float, now_s: float, pace_s: float) -> bool:
        """Check the model by the updates' agreement, for fleets that report no losses.

        Updates of pure noise point in different directions.
        """
        if math.isnan(agreement):
            return False
        times = math.inf if agreement > AGREEMENT_STILL else 0.0
        return self._judge(times, "updates agree again", now_s, pace_s)

    def joined(self, voter: str, name: str, losses: BaseLosses, now_s: float) -> bool:
        """Check the losses of a new voter, once; return whether to wake the fleet."""
        known = self.state.known
        if voter in known:
            return False
        known[voter] = None
        if len(known) > KNOWN_MAX:
            del known[next(iter(known))]
        if not self.state.told.has_risen(losses.newest, NEWS_SHARE):
            return False
        return self.wake(f"{name} has joined with data that the model does not fit", now_s)

    def has_news(self, losses: BaseLosses) -> bool:
        """Return whether a device's newest loss is far above all its earlier ones."""
        if len(losses.before) + len(losses.recent) <= MEASURED_UPDATES or math.isnan(self.state.told.first):
            return False
        *before, newest = *losses.before, *losses.recent
        highest = max(before)
        return newest > highest + max(self.state.told.learnt, highest - median(before))

    # -- pace ------------------------------------------------------------------------------------------------

    def wake(self, cause: str, now_s: float) -> bool:
        """Return to the normal pace; return whether the fleet was idle."""
        state = self.state
        rested, state.resting = state.resting, False
        if rested:
            state.cause = cause
        state.since_s = state.judged_s = now_s
        state.judged = 0
        return rested

    def nudge(self, now_s: float, pace_s: float) -> None:
        """Shorten the plateau's duration, since the model may improve."""
        state = self.state
        still_s = max(0.0, KEPT * (now_s - state.since_s) - patience_s(pace_s))
        state.since_s = now_s - still_s

    def period_s(self, pace_s: float, longest_s: float) -> float:
        """Return the time between two exchanges, from `pace_s` (normal) to `longest_s`."""
        state = self.state
        if state.judged < JUDGED_MIN:
            return pace_s
        return max(pace_s, min(longest_s, SHARE * (self.still_s - patience_s(pace_s))))

    @property
    def still_s(self) -> float:
        """The plateau's duration in seconds, up to the last check."""
        return self.state.judged_s - self.state.since_s

    def _judge(self, times: float, cause: str, now_s: float, pace_s: float) -> bool:
        state = self.state
        if times >= MUCH_BETTER:
            return self.wake(cause, now_s)
        if times > 0.0:
            self.nudge(now_s, pace_s)
        state.judged_s = now_s
        state.judged += 1
        return False


def patience_s(pace_s: float) -> float:
    """Return how long a plateau must last before the fleet goes idle."""
    return min(PATIENCE_PERIODS_MAX * pace_s, max(PATIENCE_PERIODS * pace_s, PATIENCE_S))
