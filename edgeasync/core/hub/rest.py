"""When a fleet rests: once the model no longer gets better, its devices exchange more and more rarely.

The period is a share of the time for which the model has stood still. So a pause in learning costs at most that
share of its own length, and a fleet that has learnt makes few exchanges, however long it runs.
"""

import math

import msgspec

from edgeasync.measurements.device import BaseLosses
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.measurements.votes import Votes

SHARE = 0.25
"""The period of a resting fleet, as a share of the time for which the model has stood still."""

PATIENCE_PERIODS = 30.0
PATIENCE_PERIODS_MAX = 100.0
PATIENCE_S = 300.0
"""A fleet rests once its model has stood still for 30 periods at full pace, or up to 100 that fit in this time."""

JUDGED_MIN = 5
"""And it must have been judged this many times."""

BETTER_SHARE = 0.01
BETTER_SHARE_FIRST = 0.001
"""A loss is better if it is lower by these shares: of itself, and of the first loss."""

BETTER_ACCURACY = 0.001

MUCH_BETTER = 10.0
"""This many times the least improvement brings back the full pace at once; a smaller one in steps."""

KEPT = 1.0 / 3.0
"""What a small improvement leaves of the time for which the model has stood still."""

RISE_SHARE = 0.1
"""A loss has risen if it is over the highest since the last improvement by this share of all that was learnt."""

NEWS_SHARE = 0.5
"""A newcomer brings something new at this share of such a rise. It wakes the fleet only once."""

NEW_UPDATES = 3
"""A newcomer's data are judged by its update of this number."""

MEASURED_UPDATES = 5
"""A device does not rest before it has sent this many updates."""

ROUSED_UPDATES = 8
"""A device whose own loss has risen does not rest for this many updates."""

AGREEMENT_STILL = 0.1
"""Where nobody tells a loss: a model stands still while updates point apart as much as this mean cosine."""

KNOWN_MAX = 4096
"""How many voters are remembered as no newcomers."""


class Track(msgspec.Struct):
    """A loss over time: the first one, the best one, and the worst since it last got better."""

    first: float = math.nan
    best: float = math.inf
    worst: float = -math.inf

    def improvement(self, loss: float) -> float:
        """Return by how many times the least improvement a loss is better than the best; 0 if by less than one."""
        if math.isnan(self.first):
            return math.inf
        least = max(BETTER_SHARE * abs(self.best), BETTER_SHARE_FIRST * abs(self.first), 1e-12)
        times = (self.best - loss) / least
        return times if times >= 1.0 else 0.0

    def note(self, loss: float, worse: float, *, better: bool) -> None:
        """Record a loss, of which most have at least `worse`; later ones are compared with a `better` one."""
        if math.isnan(self.first):
            self.first = loss
        if better:
            self.best, self.worst = loss, worse
        else:
            self.worst = max(self.worst, worse)

    def has_risen(self, loss: float, share: float = 1.0) -> bool:
        """Return whether a loss is over all since the last improvement by a rise, or by that share of one."""
        rise = share * max(self.learnt, self.worst - self.best)
        return not math.isnan(self.first) and loss > self.worst + rise

    @property
    def learnt(self) -> float:
        """The share `RISE_SHARE` of what the loss has fallen by, or of what is left if that is more."""
        return RISE_SHARE * max(abs(self.first - self.best), abs(self.best))


class RestState(msgspec.Struct):
    """What `Rest` remembers. All fields are durable.

    The model last got better, or there was news, at `since_s`. It was last judged at `judged_s`, `judged` times
    since then. `evaluated` has the losses of evaluations, `told` those that most voters reach, `told_by_half`
    those that at least half of them reach. `known` has the voters that are no newcomers. `cause` says why the
    fleet last came back to its full pace.
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
    """Judges whether the model gets better, and returns how long a period is. Depends on its arguments alone."""

    def __init__(self) -> None:
        self.state = RestState()

    # -- what is judged --------------------------------------------------------------------------------------

    def evaluated(self, loss: float, accuracy: float | None, now_s: float, pace_s: float) -> bool:
        """Judge the model by an evaluation on held-out data; return whether the fleet is to wake."""
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
            return self.wake(f"the loss on held-out data rose to {loss:.3g}", now_s)
        return self._judge(times, "the model got better on held-out data", now_s, pace_s)

    def told(self, losses: Votes, voters_live: int, now_s: float, pace_s: float, *, judges: bool) -> bool:
        """Judge by what voters tell of the model; with `judges` also whether it gets better, not only worse.

        More than half of the voters must tell a loss. It is better once most reach a lower one, and worse once
        most have a higher one: one key's word decides neither.
        """
        ordered = losses.ordered
        if 2 * len(ordered) <= min(voters_live, WINDOW):
            return False
        most_reach, most_have = ordered[len(ordered) // 2], ordered[(len(ordered) - 1) // 2]
        track = self.state.told
        if track.has_risen(most_have):
            track.note(most_reach, most_have, better=True)
            self.state.told_by_half.note(most_have, most_have, better=True)
            return self.wake(f"the devices' losses of the model rose to {most_have:.3g}", now_s)
        times = track.improvement(most_reach)
        track.note(most_reach, most_have, better=times > 0.0)
        half = self.state.told_by_half
        times_by_half = half.improvement(most_have)
        half.note(most_have, most_have, better=times_by_half > 0.0)
        if times_by_half and not times:
            times = 1.0  # of two voters one's loss falls: the period gets shorter, but one word is no wake
        return judges and self._judge(times, "the devices' losses of the model fell", now_s, pace_s)

    def moved(self, agreement: float, now_s: float, pace_s: float) -> bool:
        """Judge by how far updates agree, where nobody tells a loss: noise alone moves a model nowhere."""
        if math.isnan(agreement):
            return False
        times = math.inf if agreement > AGREEMENT_STILL else 0.0
        return self._judge(times, "updates point the same way", now_s, pace_s)

    def joined(self, voter: str, name: str, losses: BaseLosses, now_s: float) -> bool:
        """Judge a newcomer's data; return whether the fleet is to wake: at most once for each voter."""
        known = self.state.known
        if voter in known:
            return False
        known[voter] = None
        if len(known) > KNOWN_MAX:
            del known[next(iter(known))]
        if not self.state.told.has_risen(losses.newest, NEWS_SHARE):
            return False
        return self.wake(f"{name} has joined, and the model does not fit its data", now_s)

    def has_news(self, losses: BaseLosses) -> bool:
        """Return whether the newest loss that a device told is far over all that it told before."""
        if len(losses.before) + len(losses.recent) <= MEASURED_UPDATES or math.isnan(self.state.told.first):
            return False
        *before, newest = *losses.before, *losses.recent
        highest = max(before)
        return newest > highest + max(self.state.told.learnt, highest - median(before))

    # -- what follows ----------------------------------------------------------------------------------------

    def wake(self, cause: str, now_s: float) -> bool:
        """Come back to the full pace; return whether the fleet was resting."""
        state = self.state
        rested, state.resting = state.resting, False
        if rested:
            state.cause = cause
        state.since_s = state.judged_s = now_s
        state.judged = 0
        return rested

    def nudge(self, now_s: float, pace_s: float) -> None:
        """Shorten the time for which the model has stood still: something may become better."""
        state = self.state
        still_s = max(0.0, KEPT * (now_s - state.since_s) - patience_s(pace_s))
        state.since_s = now_s - still_s

    def period_s(self, pace_s: float, longest_s: float) -> float:
        """Return the time between two exchanges of a device, from `pace_s`, the full pace, to `longest_s`."""
        state = self.state
        if state.judged < JUDGED_MIN:
            return pace_s
        return max(pace_s, min(longest_s, SHARE * (self.still_s - patience_s(pace_s))))

    @property
    def still_s(self) -> float:
        """For how long the model has stood still, up to when it was last judged."""
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
    """Return for how long a model must have stood still before its fleet rests."""
    return min(PATIENCE_PERIODS_MAX * pace_s, max(PATIENCE_PERIODS * pace_s, PATIENCE_S))
