"""Limits the statistics that a device reports to plausible values. Part of `HubCore`.

The hub clamps an impossible value, and accepts the report. Honest devices never send such values.
The hub cannot know how many steps a device took without a hub, between its last update and the
assignment. The norm of an update with such steps is not meaningful, so it is neither monitored nor
compared with other norms. The update is clipped like any other update.
"""

import math

import msgspec

from edgeasync.protocol.messages import Push

STEP_S_MAX = 3600.0
"""Maximum duration of a local step in seconds."""

CLOCKS_APART = 1.1
"""The device's clock may run faster than the hub's by at most this factor."""

EXAMPLES_PER_STEP_MAX = 1 << 16
"""Maximum number of examples per local step for a device that does not report the size of its
data.
"""

BATCHES_OF_ALL_MAX = 4
"""How often one local step may use each example of the device, for example with augmentation."""

LOSS_MAX = 1e30
VARIANCE_MAX = 1e60
"""Maximum of losses, scores and variances, so that their squares and sums stay finite."""


class ReportedStats(msgspec.Struct, frozen=True, gc=False):
    """The statistics of a push, limited to plausible values.

    Losses and scores may be infinite, NaN or `None`. `score` is the loss of the device's own
    parameters if it reports that loss, otherwise the loss of its base version. `base_loss` is the
    loss of its base version, on held-out examples or on the first batch. `alone` is set if, before
    the assignment arrived, the device took more steps than the hub allows.
    """

    local_steps: int
    overlap_steps: int
    examples: int
    step_s: float
    loss_mean: float | None
    loss_variance: float | None
    score: float | None
    base_loss: float | None
    alone: bool


def clamp(
    push: Push,
    *,
    steps_max: int,
    overlap_steps_max: int,
    examples_told: int,
    cycle_s: float | None,
    slack_s: float,
) -> ReportedStats:
    """Limit the statistics of a push to what the hub considers plausible.

    `steps_max` limits the number of local steps after the assignment, and `overlap_steps_max` the
    number of local steps before it. `examples_told` is the number of examples that the device
    reports (0: not reported). `cycle_s` is the time since the assignment by the hub's clock
    (`None`: not measured). The reported duration of the steps may exceed that time by `slack_s`.
    """
    overlap_steps = min(push.overlap_steps, push.local_steps)
    steps = min(push.local_steps - overlap_steps, steps_max)
    local_steps = max(1, steps + overlap_steps)
    examples = (
        push.examples if local_steps == push.local_steps else push.examples * local_steps // push.local_steps
    )
    per_step_max = BATCHES_OF_ALL_MAX * examples_told if examples_told else EXAMPLES_PER_STEP_MAX
    by_clock_s = STEP_S_MAX
    if cycle_s is not None and steps:
        by_clock_s = (CLOCKS_APART * cycle_s + slack_s) / steps
    score = push.score if push.validation_loss is None else push.validation_loss
    base_loss = push.base_loss if push.score is None else push.score
    return ReportedStats(
        local_steps=local_steps,
        overlap_steps=overlap_steps,
        examples=min(examples, local_steps * per_step_max),
        step_s=min(push.step_s, STEP_S_MAX, by_clock_s),
        loss_mean=_within(push.loss_mean, -LOSS_MAX, LOSS_MAX),
        loss_variance=_within(push.loss_variance, 0.0, VARIANCE_MAX),
        score=score if score is None else _within(score, -LOSS_MAX, LOSS_MAX),
        base_loss=base_loss if base_loss is None else _within(base_loss, -LOSS_MAX, LOSS_MAX),
        alone=overlap_steps > overlap_steps_max,
    )


def _within(value: float | None, low: float, high: float) -> float | None:
    """Clamp a finite value to the bounds; return an infinite value or NaN unchanged."""
    if value is None or low <= value <= high or not math.isfinite(value):
        return value
    return low if value < low else high
