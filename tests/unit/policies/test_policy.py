import msgspec
import pytest

from edgeasync.config import convert, to_table
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner, TrimmedMeanCombiner
from edgeasync.policies.frequency import AdaptiveFrequency, TimeFrequency
from edgeasync.policies.monitor import LossDetector, Monitor, UpdateNormDetector
from edgeasync.policies.optimizers import SGD, Nesterov
from edgeasync.policies.policy import Plateau, Policy, WarmUp
from edgeasync.runtime.hub_settings import HubSettings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stalenes": {}}, "unknown key `stalenes`"),
        ({"staleness": {"kind": "no such kind"}}, "staleness.kind: 'no such kind' is not known"),
        ({"staleness": {"kind": "polynomial", "momentum": 0.5}}, "staleness: unknown key `momentum`"),
        ({"staleness": {"kind": "polynomial", "exponent": -0.5}}, "staleness.exponent: expected `float` >= 0.0"),
        ({"staleness": {"kind": "polynomial", "staleness_max": -1}}, "staleness.staleness_max: expected"),
        ({"optimizer": []}, "optimizer: expected `array` of length >= 1"),
        ({"optimizer": [{"kind": "sgd"}, {"kind": "sdg"}]}, "optimizer[1].kind: 'sdg' is not known"),
        ({"frequency": {"kind": "fixed", "local_steps": 0}}, "frequency.local_steps: expected `int` >= 1"),
    ],
)
def test_what_is_unknown_or_contradictory_is_refused_with_its_path(table, message):
    with pytest.raises(ConfigError) as caught:
        convert(table, Policy, where="hub.toml")
    assert str(caught.value).startswith(f"hub.toml: {message}")


# -- parts that contradict one another -----------------------------------------------------------------------

MODEL = {"kind": "mlp", "inputs": 4, "hidden": [5], "classes": 3}
ONNX = {"kind": "onnx", "file": "m.onnx"}
NAN, INF = float("nan"), float("inf")
AT_ONCE, BY_MODEL, IN_FIVES = {"kind": "immediate"}, {"kind": "model_average"}, {"kind": "buffered"}
ROUNDS = {"kind": "synchronous"}
ONE_BY_ONE = "needs several updates per fold, but {} folds them one by one"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"aggregate": {"kind": "buffered", "wait_s_max": 0}},
            "aggregate: wait_s_max is 0; set a number of seconds over 0, or",
        ),
        (
            {"aggregate": ROUNDS | {"deadline_s": 0}},
            "aggregate: deadline_s is 0; set a number of seconds over 0, or remove",
        ),
        (
            {"aggregate": ROUNDS | {"deadline_s": INF}},
            "aggregate: deadline_s is inf; set a number of seconds over 0",
        ),
        ({"aggregate": ROUNDS | {"count": 3}}, "aggregate: unknown key `count`"),
        (
            {"frequency": {"kind": "adaptive", "local_steps_min": 200}},
            "frequency: local_steps_min (200) must not exceed local_steps_max (128)",
        ),
        (
            {"frequency": {"kind": "time", "local_steps_min": 9, "local_steps_max": 8}},
            "frequency: local_steps_min (9) must not exceed local_steps_max (8)",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share": 0.7}},
            "frequency: communication_share (0.7) must not exceed communication_share_max (0.6)",
        ),
        ({"warm_up": {}}, "warm_up: warm_up needs either updates or epochs; set exactly one of them"),
        (
            {"warm_up": {"updates": 9, "epochs": 1}},
            "warm_up: warm_up needs either updates or epochs; set exactly one",
        ),
        ({"warm_up": {"updates": 0}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"epochs": NAN}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"behind_max": 1.0}, "behind_max is 1; set a ratio over 1"),
        ({"preempt": True}, "preempt needs behind_max, the limit for a device's score; set behind_max"),
        (
            {"aggregate": BY_MODEL, "warm_up": {"updates": 9}},
            "only one of warm_up.aggregate and aggregate is model_average; set both to it, or neither",
        ),
        (
            {"warm_up": {"updates": 9, "aggregate": BY_MODEL}},
            "only one of warm_up.aggregate and aggregate is model_average; set both to it, or neither",
        ),
        (
            {"aggregate": AT_ONCE, "combine": {"kind": "median"}},
            "combine: median " + ONE_BY_ONE.format("immediate"),
        ),
        (
            {"aggregate": BY_MODEL, "combine": {"kind": "trimmed_mean"}},
            "combine: trimmed_mean " + ONE_BY_ONE.format("model_average"),
        ),
        (
            {"combine": {"kind": "median"}, "warm_up": {"updates": 9, "aggregate": AT_ONCE}},
            "combine: median " + ONE_BY_ONE.format("immediate"),
        ),
        (
            {"combine": {"kind": "median"}, "take": "best"},
            "take = 'best' selects a single update, so median has nothing to combine; set combine.kind = 'mean'",
        ),
        (
            {"combine": {"kind": "median"}, "aggregate": {"kind": "quorum", "weigh_by": "examples"}},
            "combine: median gives all devices the same share; remove aggregate.weigh_by",
        ),
        (
            {"frequency": {"kind": "fixed", "local_steps": 10}, "delay_steps": 11},
            "delay_steps (11) must not exceed the 10 local steps of an update, because a device has only one",
        ),
        (
            {"delay_steps": 1},
            "delay_steps needs frequency.kind = 'fixed', not adaptive",
        ),
        (
            {"frequency": {"kind": "fixed"}, "delay_steps": 1, "overlap_steps_max": 4},
            "delay_steps and overlap_steps_max cannot be combined; remove overlap_steps_max",
        ),
        (
            {"optimizer": [{"kind": "adam"}, {"kind": "clip_by_global_norm"}]},
            "`clip_by_global_norm` at 1 must come before `adam` at 0",
        ),
        (
            {"trust": "open", "aggregate": {"kind": "quorum", "weigh_by": "examples"}},
            "combine: centred_clip (the default of trust = 'open') gives all devices the same share; remove",
        ),
        ({"trust": "closed"}, "trust: 'closed' is not known"),
        (
            {"monitor": {"detectors": [{"kind": "loss", "remedy": "quarantine"}]}},
            "monitor.detectors[0].remedy: 'quarantine' is not known",
        ),
    ],
)
def test_parts_that_contradict_one_another_are_refused_with_a_sentence(table, message):
    with pytest.raises(ConfigError) as caught:
        convert(table, Policy, where="hub.toml")
    assert str(caught.value).startswith(f"hub.toml: {message}")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"hub": {"stop": {"accuracy": 0.9}}},
            "hub.stop.accuracy needs held-out data; set evaluation.data",
        ),
        (
            {
                "hub": {"stop": {"accuracy": 0.9}},
                "evaluation": {"data": "test.npz"},
                "model": ONNX | {"loss": "mse"},
            },
            "hub.stop.accuracy can never be reached: only the loss cross_entropy has an accuracy",
        ),
        (
            {"policy": {"aggregate": {"kind": "buffered", "count": 65}}},
            "policy.aggregate.count (65) must not exceed limits.updates_held_max (64)",
        ),
        (
            {"codec": {"push": "int8"}, "policy": {"aggregate": {"kind": "model_average"}}},
            "codec.push = 'int8' is too lossy: under this policy.aggregate",
        ),
    ],
)
def test_a_hubs_settings_that_contradict_one_another_are_refused(table, message):
    with pytest.raises(ConfigError) as caught:
        convert({"model": MODEL} | table, HubSettings, where="hub.toml")
    assert str(caught.value).startswith(f"hub.toml: {message}")


@pytest.mark.parametrize(
    "table",
    [
        {"hub": {"stop": {"accuracy": 0.9}}, "evaluation": {"data": "test.npz"}},
        {"policy": {"aggregate": {"kind": "buffered", "count": 64}}},
        {"policy": {"aggregate": BY_MODEL, "warm_up": {"epochs": 0.5, "aggregate": BY_MODEL}}},
        {"policy": {"aggregate": AT_ONCE, "behind_max": 1.5, "take": "best"}},
        {"policy": {"aggregate": IN_FIVES, "combine": {"kind": "median"}, "take": "better"}},
        {"policy": {"aggregate": IN_FIVES | {"weigh_by": "examples"}, "take": "best"}},
        {
            "policy": {
                "frequency": {"kind": "adaptive", "communication_share": 0.01, "communication_share_max": 0.01}
            }
        },
        {"policy": {"warm_up": {"updates": 9, "aggregate": AT_ONCE}}},
    ],
)
def test_parts_that_go_together(table):
    convert({"model": MODEL} | table, HubSettings, where="hub.toml")


(USUAL,) = Policy().optimizer


@pytest.mark.parametrize(
    ("parts", "combine", "optimizer"),
    [
        ({}, CentredClipCombiner(), (SGD(),)),
        ({"combine": CentredClipCombiner(radius=2.0)}, CentredClipCombiner(radius=2.0), (SGD(),)),
        ({"optimizer": (USUAL,)}, CentredClipCombiner(), (USUAL,)),
        ({"optimizer": (Nesterov(momentum=0.5),)}, CentredClipCombiner(), (Nesterov(momentum=0.5),)),
    ],
)
def test_an_open_fleet_is_combined_robustly_unless_you_choose(parts, combine, optimizer):
    """Chosen parts stay, also in a table that a run's folder keeps, and in a copy."""
    policy = Policy(trust="open", **parts)
    assert (policy.combine, policy.optimizer) == (combine, optimizer)
    assert convert(to_table(policy), Policy, where="again") == policy
    copy = msgspec.structs.replace(policy, overlap_steps_max=3)
    assert (copy.combine, copy.optimizer) == (combine, optimizer)
    for trust in (None, "admitted"):
        trusting = Policy(trust=trust, **parts)
        assert trusting.combine == parts.get("combine", MeanCombiner())
        assert trusting.optimizer == parts.get("optimizer", Policy().optimizer)


def test_every_part_comes_back_from_its_table():
    policy = Policy(
        take="better",
        behind_max=3.0,
        aggregate=SynchronousAggregator(share=0.3, deadline_s=9.0),
        combine=TrimmedMeanCombiner(trim=0.2),
        frequency=TimeFrequency(seconds=3.0),
        warm_up=WarmUp(epochs=2.0, aggregate=BufferedAggregator(wait_s_max=3.0), frequency=AdaptiveFrequency()),
        plateau=Plateau(patience=2),
        monitor=Monitor(detectors=(LossDetector(remedy="alert"), UpdateNormDetector()), calm_updates=3),
    )
    assert convert(to_table(policy), Policy, where="again") == policy
    assert policy.monitor.rolls_back is False
    for aggregate in (
        QuorumAggregator(share=0.5),
        ModelAverageAggregator(rate=0.5),
        SynchronousAggregator(share=0.3, deadline_s=9.0, weigh_by="examples"),
    ):
        assert convert(to_table(Policy(aggregate=aggregate)), Policy, where="again").aggregate == aggregate
