"""Rules that end a run."""

import pytest

from edgeasync.callbacks import StopTraining, StopWhen
from edgeasync.errors import ConfigError
from tests.support.parts.events import END, evaluation, exchange, update


@pytest.mark.parametrize(
    ("rule", "event", "reason"),
    [
        (StopWhen(lambda event: event.time_s > 8), END, "stopped by StopWhen"),
        (StopWhen(lambda event: event.time_s > 8, reason="enough"), END, "enough"),
        (StopWhen("loss", below=0.1), evaluation(0.05), "loss 0.05 is below 0.1"),
        (StopWhen("accuracy", above=0.9), evaluation(1.0, 0.95), "accuracy 0.95 is above 0.9"),
        (StopWhen("loss", below=0.1), exchange(0.05), "loss 0.05 is below 0.1"),
    ],
)
def test_a_rule_ends_the_run_with_its_reason(rule, event, reason):
    rule(update(1, loss=0.01))
    with pytest.raises(StopTraining, match=reason):
        rule(event)


@pytest.mark.parametrize("event", [evaluation(0.2), evaluation(float("nan")), exchange(0.2), exchange(None), END])
def test_a_rule_that_is_not_met_ends_nothing(event):
    StopWhen("loss", below=0.1)(event)


def test_a_rule_without_sense_says_what_to_give():
    for wrong in ({"rule": "loss"}, {"rule": "loss", "below": 1, "above": 2}):
        with pytest.raises(ConfigError, match=r"needs a limit: pass for example below=0\.1"):
            StopWhen(**wrong)
    for wrong in ({"rule": 3}, {"rule": lambda _: True, "below": 1}):
        with pytest.raises(
            ConfigError, match="needs either a function of an event, or the name of a number and a limit"
        ):
            StopWhen(**wrong)
    with pytest.raises(ConfigError, match="evaluations have no accuracy; to measure an accuracy, pass evaluate="):
        StopWhen("accuracy", above=0.5)(evaluation(1.0))
