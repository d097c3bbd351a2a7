import math

import pytest

from edgeasync.core.hub.effects import HubReport, WriteBest
from edgeasync.core.hub.evaluation_tracker import EvaluationTracker
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.settings import StopCondition, StopPlateau
from edgeasync.policies.policy import Plateau


def run(told, *, plateau=None, held_out=True, **stop):
    """Show evaluations; return the progress and, for each of them, its effects."""
    progress, seen = EvaluationTracker(plateau, StopCondition(**stop), held_out=held_out), []
    for number, (loss, accuracy) in enumerate(told):
        seen.append(progress.observe(Evaluated(number, loss, accuracy), 10 * number, 60.0 * number))
    return progress.state, seen


@pytest.mark.parametrize(
    ("told", "bests"),
    [
        ([(2.0, None), (1.0, None), (1.0, None), (3.0, None), (0.5, None)], [0, 1, 4]),
        # Accuracy comes first, the loss decides between equals.
        ([(2.0, 0.5), (1.0, 0.4), (9.0, 0.6), (8.0, 0.6), (8.5, 0.6)], [0, 2, 3]),
        ([(math.nan, 0.9), (math.inf, None), (2.0, 0.1), (math.nan, 0.9)], [2]),
    ],
)
def test_the_best_version_is_saved(told, bests):
    progress, seen = run(told)
    saved = {number: effects[1:] for number, effects in enumerate(seen) if len(effects) > 1}
    assert saved == {number: [WriteBest(*told[number])] for number in bests}
    assert progress.best == Evaluated(bests[-1], *told[bests[-1]])
    assert progress.last.number == len(told) - 1
    assert [effects[0].event for effects in seen] == ["evaluated"] * len(told)
    assert [effects[0].detail.endswith("the best so far") for effects in seen] == [
        n in bests for n in range(len(told))
    ]


def test_what_is_said_of_an_evaluation():
    _, seen = run([(0.51234567, 0.98765), (0.6, 0.9)])
    assert seen[0][0] == HubReport("evaluated", detail="version 0, loss 0.5123, accuracy 98.77%, the best so far")
    assert seen[1] == [HubReport("evaluated", detail="version 1, loss 0.6, accuracy 90.00%")]


HALVING = Plateau(patience=2, factor=0.5, improvement=0.1, factor_min=0.2)


@pytest.mark.parametrize(
    ("losses", "factors"),
    [
        ([1.0, 0.8, 0.6, 0.4], [1.0] * 4),
        ([1.0] * 9, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2]),
        # 0.9 is not less than 1 by more than a tenth; 0.89 is, and the count begins again from there.
        ([1.0, 0.9, 0.89, 0.81, 0.8], [1.0, 1.0, 1.0, 1.0, 1.0]),
        ([1.0, 0.9, 0.89, 0.81, 0.82], [1.0, 1.0, 1.0, 1.0, 0.5]),
        ([math.nan, math.inf, 5.0, math.nan, math.nan], [1.0, 0.5, 0.5, 0.5, 0.25]),
        ([-10.0, -10.5, -10.9, -11.1, -12.3], [1.0, 1.0, 0.5, 0.5, 0.5]),
        ([1.0, -1.0, -1.2, -1.4, -1.6], [1.0] * 5),
    ],
)
def test_the_learning_rate_falls_on_a_plateau(losses, factors):
    for count, factor in enumerate(factors, start=1):
        progress, seen = run([(loss, None) for loss in losses[:count]], plateau=HALVING)
        assert progress.learning_rate_factor == factor
        lowered = count > 1 and factor < factors[count - 2]
        assert ("plateau" in [effect.event for effect in seen[-1] if isinstance(effect, HubReport)]) == (
            lowered or (count == 1 and factor < 1.0)
        )


@pytest.mark.parametrize(
    ("stop", "told", "reached"),
    [
        ({"loss": 0.5}, (0.51, 0.99), ""),
        ({"loss": 0.5}, (0.5, None), "loss 0.5 is at most 0.5"),
        ({"loss": 0.5}, (math.nan, None), ""),
        ({"accuracy": 0.9}, (0.1, 0.899), ""),
        ({"accuracy": 0.9}, (9.0, 0.9), "accuracy 90.00% is at least 90.00%"),
        ({"accuracy": 0.9, "loss": 0.5}, (0.9, 0.95), "accuracy 95.00% is at least 90.00%"),
    ],
)
def test_when_training_has_reached_what_it_is_for(stop, told, reached):
    assert run([told], **stop)[0].reached == reached


LOSSES = [(loss, None) for loss in (1.0, 0.5, 0.49, 0.48, 0.47, 0.46, 0.1)]
ACCURACIES = [(1.0, accuracy) for accuracy in (0.5, 0.8, 0.8, 0.81, 0.81, 0.81, 0.81)]


@pytest.mark.parametrize(
    ("told", "patience", "ends"),
    [
        # Ten updates and a minute pass between two evaluations; number 1 is the last that is better by a tenth.
        (LOSSES, {"updates": 30}, 4),
        (LOSSES, {"minutes": 2}, 3),
        (LOSSES, {"updates": 30, "minutes": 4}, 5),
        (LOSSES, {"updates": 60}, None),
        (ACCURACIES, {"updates": 30}, 4),
        (ACCURACIES, {"updates": 30, "improvement": 0.005}, 6),
        ([(loss, None) for loss in (math.nan, math.nan, 1.0, math.nan, math.nan)], {"updates": 20}, 4),
    ],
)
def test_training_ends_when_evaluations_stop_improving(told, patience, ends):
    plateau = StopPlateau(**{"improvement": 0.1} | patience)
    tracker = EvaluationTracker(None, StopCondition(plateau=plateau), held_out=True)
    for number, (loss, accuracy) in enumerate(told):
        tracker.observe(Evaluated(number, loss, accuracy), 10 * number, 60.0 * number)
        if tracker.state.reached:
            break
    assert (number if tracker.state.reached else None) == ends
    if ends is not None:
        assert tracker.state.reached.startswith("no evaluation improved by ")


def warnings_in(seen):
    """Return the places of evaluations that led to a warning, and the last of these."""
    found = {
        place: effect.detail
        for place, effects in enumerate(seen)
        for effect in effects
        if isinstance(effect, HubReport) and effect.event == "warning"
    }
    return list(found), found[max(found)] if found else ""


BETTER, WORSE = (0.5, 0.9), (0.7, 0.9)


@pytest.mark.parametrize(
    ("told", "warned"),
    [
        ([BETTER] + 30 * [WORSE], [10]),
        ([BETTER] + 9 * [WORSE], []),
        ([BETTER] + 30 * [(0.62, 0.9)], []),  # it scatters
        ([BETTER] + 9 * [WORSE] + [(0.5, 0.8)] + 9 * [WORSE], []),
        ([BETTER] + 9 * [WORSE] + [(0.7, 0.91)] + 12 * [WORSE], [20]),  # the loss rises, but the model gets better
        ([(0.5 + 0.1 * n, 0.5 + 0.01 * n) for n in range(40)], []),
        ([BETTER] + 12 * [WORSE] + [(0.4, 0.9)] + 12 * [WORSE], [10, 23]),
        ([(0.5, None)] + 12 * [(math.nan, None)] + 12 * [(math.inf, None)], [22]),
        ([(-0.5, None)] + 12 * [(-0.1, None)], []),
    ],
)
def test_people_are_told_that_the_held_out_loss_keeps_rising(told, warned):
    _, seen = run(told)
    assert warnings_in(seen)[0] == warned
    assert not warnings_in(run(told, held_out=False)[1])[0], "training losses say nothing of the kind"


def test_the_warning_names_the_best_version_and_what_ends_training():
    _, seen = run([BETTER] + 10 * [WORSE])
    assert warnings_in(seen)[1] == (
        "the held-out loss rose from 0.5 to 0.7 and has not recovered for 10 evaluations: the devices overfit "
        "their own data. Version 0 is the best; set hub.stop.plateau to end training, or policy.plateau to lower "
        "the learning rate"
    )


def test_a_plateau_needs_patience():
    with pytest.raises(ValueError, match="set updates, minutes or both"):
        StopPlateau()
