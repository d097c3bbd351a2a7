import msgspec
import pytest

from edgeasync.config import convert, read_toml, to_table
from edgeasync.errors import ConfigError
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner, TrimmedMeanCombiner
from edgeasync.policies.frequency import AdaptiveFrequency, Cadence, FixedFrequency, TimeFrequency
from edgeasync.policies.monitor import LossDetector, Monitor, UpdateNormDetector
from edgeasync.policies.optimizers import SGD, Nesterov
from edgeasync.policies.policy import Plateau, Policy, WarmUp
from edgeasync.policies.staleness import PolynomialStaleness, Staleness
from edgeasync.runtime.hub_settings import HubSettings


def test_everything_has_a_default():
    assert convert({}, Policy, where="[policy]") == Policy()
    assert Policy().staleness(Staleness(0)) == 1.0
    assert Policy().frequency.interval(DeviceMeasurements(), Cadence()).local_steps >= 1


def test_every_part_is_chosen_by_kind(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        'staleness = { kind = "polynomial", exponent = 1, staleness_max = 20 }\n'
        'aggregate = { kind = "immediate" }\n'
        'optimizer = [{ kind = "sgd", learning_rate = 0.5, momentum = 0.9 }]\n'
        'frequency = { kind = "fixed", local_steps = 8 }\n'
    )
    policy = read_toml(path, Policy)
    assert policy == Policy(
        staleness=PolynomialStaleness(exponent=1.0, staleness_max=20),
        aggregate=ImmediateAggregator(),
        optimizer=(SGD(learning_rate=0.5, momentum=0.9),),
        frequency=FixedFrequency(local_steps=8),
    )
    assert convert(to_table(policy), Policy, where="again") == policy


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stalenes": {}}, "unknown key `stalenes`"),
        ({"staleness": {"kind": "no such kind"}}, "staleness.kind: 'no such kind' is not known"),
        ({"staleness": {"kind": "polynomial", "momentum": 0.5}}, "staleness: unknown key `momentum`"),
        ({"staleness": {"kind": "polynomial", "exponent": -0.5}}, "staleness.exponent: expected `float` >= 0.0"),
        (
            {"staleness": {"kind": "polynomial", "exponent": float("nan")}},
            "staleness.exponent: expected `float` >= 0.0",
        ),
        ({"staleness": {"kind": "polynomial", "staleness_max": -1}}, "staleness.staleness_max: expected"),
        ({"aggregate": {"kind": "immediate", "count": 5}}, "aggregate: unknown key `count`"),
        ({"optimizer": []}, "optimizer: expected `array` of length >= 1"),
        ({"optimizer": {"kind": "sgd"}}, "optimizer: expected `array`"),
        ({"optimizer": [{"kind": "sgd"}, {"kind": "sdg"}]}, "optimizer[1].kind: 'sdg' is not known"),
        (
            {"optimizer": [{"kind": "sgd", "learning_rate": 0}]},
            "optimizer[0].learning_rate: expected `float` > 0.0",
        ),
        ({"optimizer": [{"kind": "sgd", "momentum": 1}]}, "optimizer[0].momentum: expected `float` < 1.0"),
        ({"frequency": {"kind": "fixed", "local_steps": 0}}, "frequency.local_steps: expected `int` >= 1"),
        ({"frequency": {"kind": "fixed", "local_steps": 1.5}}, "frequency.local_steps: expected `int`"),
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
            {"aggregate": {"kind": "buffered", "wait_s_max": -3}},
            "aggregate: wait_s_max is -3; set a number of seconds over 0",
        ),
        (
            {"aggregate": {"kind": "buffered", "wait_s_max": NAN}},
            "aggregate: wait_s_max is nan; set a number of seconds over 0",
        ),
        (
            {"aggregate": {"kind": "buffered", "wait_s_max": INF}},
            "aggregate: wait_s_max is inf; set a number of seconds over 0",
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
            {"frequency": {"kind": "adaptive", "period_steps_min": 200}},
            "frequency: period_steps_min (200) must not exceed local_steps_max (128)",
        ),
        (
            {"frequency": {"kind": "time", "local_steps_min": 9, "local_steps_max": 8}},
            "frequency: local_steps_min (9) must not exceed local_steps_max (8)",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share": 0.7}},
            "frequency: communication_share (0.7) must not exceed communication_share_max (0.6)",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share": 0.0099}},
            "frequency.communication_share: expected `float` >= 0.01",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share": NAN}},
            "frequency.communication_share: expected `float`",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share_max": 0.0099}},
            "frequency.communication_share_max: expected `float` >= 0.01",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share_max": 1.0}},
            "frequency.communication_share_max: expected `float` < 1.0",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share_max": INF}},
            "frequency.communication_share_max: expected `float`",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share_max": NAN}},
            "frequency.communication_share_max: expected `float`",
        ),
        (
            {"frequency": {"kind": "adaptive", "communication_share_max": -INF}},
            "frequency.communication_share_max: expected `float`",
        ),
        ({"warm_up": {}}, "warm_up: warm_up needs either updates or epochs; set exactly one of them"),
        ({"warm_up": {"updates": 9, "epochs": 1}}, "warm_up: warm_up needs either updates or epochs; set"),
        ({"warm_up": {"updates": 0}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"updates": -1}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"epochs": 0.0}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"epochs": -0.5}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"epochs": INF}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"warm_up": {"epochs": NAN}}, "warm_up: warm_up.updates and warm_up.epochs must be over 0"),
        ({"behind_max": 1.0}, "behind_max is 1; set a ratio over 1"),
        ({"preempt": True}, "preempt needs behind_max, the limit for a device's score; set behind_max"),
        ({"behind_max": NAN}, "behind_max is nan; set a ratio over 1"),
        ({"behind_max": INF}, "behind_max is inf; set a ratio over 1"),
        (
            {"aggregate": BY_MODEL, "warm_up": {"updates": 9}},
            "warm_up.aggregate and aggregate need different updates; set both to model_average, or neither",
        ),
        (
            {"warm_up": {"updates": 9, "aggregate": BY_MODEL}},
            "warm_up.aggregate and aggregate need different updates; set both to model_average, or neither",
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
            {"combine": {"kind": "trimmed_mean"}, "take": "best", "aggregate": IN_FIVES},
            "take = 'best' selects a single update, so trimmed_mean has nothing to combine",
        ),
        (
            {"combine": {"kind": "median"}, "aggregate": {"kind": "quorum", "weigh_by": "examples"}},
            "combine: median gives all devices the same share; remove aggregate.weigh_by",
        ),
        (
            {
                "combine": {"kind": "median"},
                "warm_up": {"updates": 9, "aggregate": IN_FIVES | {"weigh_by": "examples"}},
            },
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
        (
            {"trust": "open", "take": "best"},
            "take = 'best' selects a single update, so centred_clip (the default of trust = 'open') has nothing",
        ),
        ({"trust": "closed"}, "trust: 'closed' is not known"),
        ({"monitor": {"probation": 0.0}}, "monitor.probation: expected `float` > 0.0"),
        ({"monitor": {"probation": 1.5}}, "monitor.probation: expected `float` <= 1.0"),
        ({"monitor": {"detectors": [{"kind": "update_norm", "remedy": "alert"}]}}, "monitor.detectors[0]"),
        ({"monitor": {"detectors": [{"kind": "gradient_norm"}]}}, "monitor.detectors[0]"),
        ({"combine": {"kind": "trimmed_mean", "trim": 0.5}}, "combine.trim: expected `float` < 0.5"),
        ({"take": "worst"}, "take: 'worst' is not known"),
        ({"plateau": {"factor": 1.0}}, "plateau.factor: expected `float` < 1.0"),
        ({"monitor": {"calm_updates": 0}}, "monitor.calm_updates: expected `int` >= 1"),
        (
            {"monitor": {"detectors": [{"kind": "loss", "ratio_max": 1}]}},
            "monitor.detectors[0].ratio_max: expected",
        ),
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
            {
                "hub": {"stop": {"accuracy": 0.9}},
                "evaluation": {"data": "test.npz"},
                "model": ONNX | {"loss": {"kind": "huber", "delta": 2.0}},
            },
            "hub.stop.accuracy can never be reached",
        ),
        (
            {"policy": {"aggregate": {"kind": "buffered", "count": 65}}},
            "policy.aggregate.count (65) must not exceed limits.updates_held_max (64)",
        ),
        (
            {"policy": {"warm_up": {"updates": 9, "aggregate": {"kind": "buffered", "count": 65}}}},
            "policy.warm_up.aggregate.count (65) must not exceed limits.updates_held_max (64)",
        ),
        ({"codec": {"push": "zip"}}, "codec: unknown codec 'zip'; known: identity, "),
        ({"codec": {"push": "off"}}, "codec: push = 'off': devices must send something"),
        ({"codec": {"model": "int8"}}, "codec: model = 'int8': whole models travel as one of identity, float16"),
        ({"codec": {"delta": "auto"}}, "codec: delta = 'auto': the chain is one for all devices"),
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
        {"hub": {"stop": {"accuracy": 0.9}}, "evaluation": {"data": "test.npz"}, "model": ONNX},
        {"policy": {"aggregate": {"kind": "buffered", "count": 64}}},
        {"policy": {"aggregate": ROUNDS | {"share": 0.5, "deadline_s": 1.0}}},
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
        {"policy": {"aggregate": ROUNDS, "monitor": {"detectors": []}}},
    ],
)
def test_parts_that_go_together(table):
    convert({"model": MODEL} | table, HubSettings, where="hub.toml")


(USUAL,) = Policy().optimizer


@pytest.mark.parametrize(
    ("parts", "combine", "optimizer"),
    [
        ({}, CentredClipCombiner(), (SGD(),)),
        ({"combine": MeanCombiner()}, MeanCombiner(), (SGD(),)),
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
