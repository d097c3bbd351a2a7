import pytest

from edgeasync.config import convert, read_toml, to_table
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import Contribution, ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import PolynomialStaleness


def test_everything_has_a_default():
    assert convert({}, Policy, where="[policy]") == Policy()
    assert Policy().staleness(0) == 1.0
    assert Policy().frequency("a", {}) >= 1


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
        ({"staleness": {"kind": "no such kind"}}, "staleness.kind: invalid value 'no such kind'"),
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
        ({"optimizer": [{"kind": "sgd"}, {"kind": "sdg"}]}, "optimizer[1].kind: invalid value 'sdg'"),
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


def contribution(handle, weight, arrived_s):
    return Contribution(handle, "a", weight, 1.0, 10, 0, arrived_s)


def test_immediate_is_due_at_once_and_keeps_the_weights():
    aggregator = ImmediateAggregator()
    buffered = [contribution(0, 1.0, 3.0), contribution(1, 0.25, 4.0)]
    assert aggregator.answer == "now"
    assert aggregator.flush_at_s(buffered, devices_live=7) == 3.0
    assert aggregator.weights(buffered) == (1.0, 0.25)


def test_fixed_frequency_is_the_same_for_everyone():
    frequency = FixedFrequency(local_steps=5)
    assert [frequency(name, {}) for name in ("a", "b", "a")] == [5, 5, 5]
