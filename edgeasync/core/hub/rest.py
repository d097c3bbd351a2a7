"""Decides when a fleet idles: as training plateaus, devices exchange less often.

The exchange period of an idle fleet is a fraction of the duration of the plateau. So if training
improves again, the fleet has lost at most that fraction of the plateau's duration. The longer the
plateau lasts, the more rarely the fleet exchanges.
"""

import math

import msgspec

from edgeasync.measurements.device import BaseLosses
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.measurements.votes import Votes

SHARE = 0.25
"""The exchange period of an idle fleet, as a fraction of the plateau's duration."""

PATIENCE_PERIODS = 30.0
PATIENCE_PERIODS_MAX = 100.0
PATIENCE_S = 300.0
"""Minimum duration of a plateau before the fleet goes idle.

It is increased to 30 normal exchange periods if they take longer, and limited to 100 periods.
"""

JUDGED_MIN = 5
"""Minimum number of checks of the model during a plateau before the fleet goes idle."""

BETTER_SHARE = 0.01
BETTER_SHARE_FIRST = 0.001
"""An improvement must lower the best loss by at least 1 % of the best loss, and by at least 0.1 %
of the first loss.
"""

BETTER_ACCURACY = 0.001

MUCH_BETTER = 10.0
"""If an improvement is at least this multiple of the minimum improvement, the normal pace resumes
immediately.
"""

KEPT = 1.0 / 3.0
"""The factor by which a small improvement multiplies the duration of the plateau."""

RISE_SHARE = 0.1
"""A loss has risen if it exceeds the worst loss since the last improvement by this fraction of the
total decrease of the loss.
"""

NEWS_SHARE = 0.5
"""The losses of a new voter wake the fleet if they exceed the worst loss by this fraction of the
rise that `RISE_SHARE` defines. They are checked only once.
"""

NEW_UPDATES = 3
"""The hub checks the losses of a new voter once, when one of its devices has sent this number of
updates.
"""

MEASURED_UPDATES = 5
"""A device does not idle before it has sent this many updates."""

ROUSED_UPDATES = 8
"""A device whose own loss has risen does not idle for this many updates."""

AGREEMENT_STILL = 0.1
"""If no losses are reported, training has plateaued while the mean cosine similarity of the updates
is at most this value.
"""

KNOWN_MAX = 4096
"""Maximum number of known voters to store. A known voter does not count as new again."""


class Track(msgspec.Struct):
    """Tracks a loss: its first value, its best value, and its worst since the last improvement."""

    first: float = math.nan
    best: float = math.inf
    worst: float = -math.inf

    def improvement(self, loss: float) -> float:
        """Return the improvement that a loss brings, as a multiple of the minimum improvement.

        Return 0 if the loss improves by less than the minimum, or rises.
        """
        if math.isnan(self.first):
            return math.inf
        least = max(BETTER_SHARE * abs(self.best), BETTER_SHARE_FIRST * abs(self.first), 1e-12)
        times = (self.best - loss) / least
        return times if times >= 1.0 else 0.0

    def note(self, loss: float, worse: float, *, better: bool) -> None:
        """Record a loss and its upper estimate `worse`.

        If `better` is set, they become the new best and worst loss.
        """
        if math.isnan(self.first):
            self.first = loss
        if better:
            self.best, self.worst = loss, worse
        else:
            self.worst = max(self.worst, worse)

    def has_risen(self, loss: float, share: float = 1.0) -> bool:
        """Return whether a loss exceeds the worst loss by more than `share` of a rise."""
        rise = share * max(self.learnt, self.worst - self.best)
        return not math.isnan(self.first) and loss > self.worst + rise

    @property
    def learnt(self) -> float:
        """`RISE_SHARE` of the loss's decrease so far, or of its best value if that is larger."""
        return RISE_SHARE * max(abs(self.first - self.best), abs(self.best))


class RestState(msgspec.Struct):
    """The durable fields of `Rest`.

    - `since_s` is the time at which the model last improved or new data arrived.
    - `judged_s` is the time of the last check. `judged` counts the checks since `since_s`.
    - `evaluated` tracks the losses of evaluations. `told` tracks the losses that most voters
      reach, and `told_by_half` the losses that at least half of the voters reach.
    - `known` lists the voters whose first losses were checked.
    - `cause` is the reason why the fleet last returned to its normal pace.
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
        """Use a result on held-out data to check whether the model is improving.

        Return whether to wake the fleet.
        """
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
        """Use the losses of voters to check whether the model is improving.

        Return whether to wake the fleet. More than half of the voters must report a loss. The model
        is better once most voters reach a lower loss, and worse once most voters have a higher
        loss, so a single key cannot decide either. If `judges` is false, the check only detects
        that the model has become worse.
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
            times = 1.0  # only half of the voters improved: shorten the period, but do not wake the fleet
        return judges and self._judge(times, "the devices' losses fell", now_s, pace_s)

    def moved(self, agreement: float, now_s: float, pace_s: float) -> bool:
        """Check by the agreement of updates whether the model improves; return whether to wake.

        Fleets that report no losses use this check. Updates that contain only noise point in
        different directions.
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
        """Return whether a device's newest loss is far above all its earlier losses."""
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
        """Shorten the duration of the plateau, since the model may improve."""
        state = self.state
        still_s = max(0.0, KEPT * (now_s - state.since_s) - patience_s(pace_s))
        state.since_s = now_s - still_s

    def period_s(self, pace_s: float, longest_s: float) -> float:
        """Return the time between two exchanges.

        It is at least `pace_s`, the normal pace, and at most `longest_s`.
        """
        state = self.state
        if state.judged < JUDGED_MIN:
            return pace_s
        return max(pace_s, min(longest_s, SHARE * (self.still_s - patience_s(pace_s))))

    @property
    def still_s(self) -> float:
        """The duration of the plateau until the last check, in seconds."""
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
