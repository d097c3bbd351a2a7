"""What a device says of an update, held against what the hub knows, before any policy sees it. Part of `HubCore`.

A claim that cannot be true is clamped, not refused: an honest device never makes one. How many steps a device took
while it was alone, between its last update and the assignment, the hub cannot know. So such an update has a
length that says nothing: it is neither watched nor compared with others, and shortened like any other.
"""

import math

import msgspec

from edgeasync.protocol.messages import Push

STEP_S_MAX = 3600.0
"""No local step takes longer."""

CLOCKS_APART = 1.1
"""How much longer the device's clock may show a time than the hub's."""

EXAMPLES_PER_STEP_MAX = 1 << 16
"""The most examples in a local step of a device that does not say how many it has."""

BATCHES_OF_ALL_MAX = 4
"""How many times a device may see all its data in one local step, by augmentation."""

LOSS_MAX = 1e30
VARIANCE_MAX = 1e60
"""A loss or score, or a variance, beyond these counts as them: squares and sums of them stay finite."""


class ReportedStats(msgspec.Struct, frozen=True, gc=False):
    """What a push says, within what can be true. Losses and scores may still be infinite or NaN, or missing.

    `score` is the loss of the device's own parameters if it tells that, else that of the model it trained from.
    `base_loss` is the latter in any case: by examples that were kept for that, or else by the first batch.
    `alone`: the device says that it took more steps before the assignment came than the hub allows.
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
    """Return what a push says, held against the hub's own knowledge.

    `steps_max` are the most local steps that it may have been trained with after its assignment, and
    `overlap_steps_max` those before that the policy allows. `examples_told` is what the device said of its data
    (0: nothing), `cycle_s` the time since the assignment by the hub's clock (`None`: not measured), and `slack_s`
    how much longer the device may say that its steps took.
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
    """Return a finite value within bounds; one that is not finite, or missing, stays what it is."""
    if value is None or low <= value <= high or not math.isfinite(value):
        return value
    return low if value < low else high
