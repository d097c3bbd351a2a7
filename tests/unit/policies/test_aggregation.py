import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.aggregation import (
    BufferedAggregator,
    Contribution,
    Fleet,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
    Waiting,
)

TEN_S = Fleet(10, period_s=10.0)
ONE_TO = {count: " ".join(f"{chr(96 + n)}@{n}" for n in range(1, count + 1)) for count in range(1, 11)}
"""By number of devices: the n-th device spoke at n seconds."""

GATHERING = [
    BufferedAggregator(count=3),
    BufferedAggregator(count=3, wait_s_max=2.5),
    QuorumAggregator(),
    QuorumAggregator(share=0.3, grace=0.0, patience=0.5),
    SynchronousAggregator(),
    SynchronousAggregator(share=0.5, deadline_s=6.0),
]


def contribution(device_id="a", arrived_s=0.0, **fields):
    usual = {"handle": 0, "weight": 1.0, "norm": 1.0, "examples": 10, "local_steps": 8, "staleness": 0}
    usual |= {"score": 1.0, "voter": device_id.partition("/")[0]}
    return Contribution(device_id=device_id, arrived_s=arrived_s, **usual | fields)


def arrivals(text):
    """Read `a@1 b@2.5`: who spoke, and when."""
    return [contribution(who, float(when)) for who, when in (word.split("@") for word in text.split())]


def column(name, *values):
    return [contribution(handle=handle, **{name: value}) for handle, value in enumerate(values)]


# -- when ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregator", "spoken", "fleet", "due_s"),
    [
        (ImmediateAggregator(), "a@3 b@4", Fleet(7), 3.0),
        (ModelAverageAggregator(), "a@3 b@4", Fleet(7), 3.0),
        (BufferedAggregator(count=3), "a@1 a@2", Fleet(2), None),
        (BufferedAggregator(count=3), "a@1 a@2 b@5", Fleet(9), 5.0),
        (BufferedAggregator(count=3, wait_s_max=4.0), "a@1 b@2", Fleet(2), 5.0),
        (BufferedAggregator(count=3, wait_s_max=4.0), "a@1 b@2 c@3", Fleet(9), 3.0),
        # Of 10 devices 6 are a quorum; the grace is 1 s, the patience 10 s.
        (QuorumAggregator(), ONE_TO[5], TEN_S, 11.0),
        (QuorumAggregator(), ONE_TO[6], TEN_S, 7.0),
        (QuorumAggregator(), ONE_TO[10], TEN_S, 10.0),
        (QuorumAggregator(), "a@1 b@2 c@3 d@4 e@5 f@10.5", TEN_S, 11.0),
        # Before a period is known patience, though not grace, takes 10 s for it.
        (QuorumAggregator(), ONE_TO[5], Fleet(10), 11.0),
        (QuorumAggregator(patience=0.5), ONE_TO[5], Fleet(10), 6.0),
        (QuorumAggregator(), ONE_TO[5], Fleet(10, 40.0), 41.0),
        (QuorumAggregator(), ONE_TO[6], Fleet(10), 6.0),
        # Who speaks twice is still one.
        (QuorumAggregator(), "a@1 a@2 b@3", Fleet(3, 10.0), 4.0),
        (QuorumAggregator(), "a@1 a@2 a@3", Fleet(3, 10.0), 11.0),
        (QuorumAggregator(), "a@1 b@4 a@9", Fleet(2, 10.0), 4.0),
        (QuorumAggregator(share=1.0, grace=5.0, patience=0.5), ONE_TO[2], TEN_S, 6.0),
        (QuorumAggregator(share=0.01), "a@2", TEN_S, 3.0),
        (QuorumAggregator(share=0.28), ONE_TO[8], Fleet(25, 10.0), 8.0),  # 0.28 * 25 is a little over 7
        (QuorumAggregator(), "a@2", Fleet(0, 10.0), 2.0),
        # Nobody waits for who is rare once all others have spoken; its word still counts for a quorum.
        (QuorumAggregator(), "a@2", Fleet(2, 10.0, infrequent={"b": 1.0}), 2.0),
        (QuorumAggregator(), "b@2", Fleet(2, 10.0, infrequent={"b": 1.0}), 12.0),
        (QuorumAggregator(), "b@2 a@5", Fleet(2, 10.0, infrequent={"b": 1.0}), 5.0),
        (QuorumAggregator(), "a@2", Fleet(3, 10.0, infrequent={"b": 1.0, "c": 1.0}), 2.0),
        (QuorumAggregator(), "a@2", Fleet(3, 10.0, infrequent={"c": 1.0}), 12.0),
        (QuorumAggregator(), "a@2", Fleet(2, 10.0, names={"b": 2}, infrequent={"b/1": 0.5, "b/2": 0.5}), 2.0),
        (QuorumAggregator(), "a@2", Fleet(1, 10.0, infrequent={"a": 1.0}), 2.0),
        (SynchronousAggregator(), "a@1 b@2 a@3", Fleet(3), None),
        (SynchronousAggregator(), "a@1 b@2 c@5", Fleet(3), 5.0),
        (SynchronousAggregator(share=0.7), ONE_TO[6], Fleet(10), None),
        (SynchronousAggregator(share=0.7), ONE_TO[8], Fleet(10), 7.0),
        (SynchronousAggregator(deadline_s=4.0), ONE_TO[2], Fleet(9), 5.0),
        (SynchronousAggregator(deadline_s=4.0), "a@1 b@9", Fleet(2), 9.0),
        (SynchronousAggregator(), "a@2", Fleet(0), 2.0),
    ],
)
def test_when_a_version_is_due_by_hand(aggregator, spoken, fleet, due_s):
    assert aggregator.flush_at_s(arrivals(spoken), fleet) == due_s


@given(
    st.sampled_from(GATHERING),
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 40)), min_size=2, max_size=12),
    st.integers(0, 6),
    st.sampled_from([0.0, 1.0, 8.0]),
)
def test_another_update_never_postpones_what_is_due(aggregator, spoken, devices_live, period_s):
    fleet = Fleet(devices_live, period_s)
    buffered = [contribution(who, float(when)) for who, when in sorted(spoken, key=lambda row: row[1])]
    before, after = [aggregator.flush_at_s(part, fleet) for part in (buffered[:-1], buffered)]
    due_s = math.inf if before is None else before
    if buffered[-1].arrived_s <= due_s:
        assert (math.inf if after is None else after) <= due_s
    if isinstance(aggregator, QuorumAggregator):
        assert after is not None, "patience ends"
    if len({item.device_id for item in buffered}) >= devices_live and not isinstance(
        aggregator, BufferedAggregator
    ):
        assert after is not None, "all have spoken, and nobody could make it due any more"


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregator", "buffered", "fleet", "weights"),
    [
        (ImmediateAggregator(), column("weight", 1.0, 0.25), Fleet(9), (1.0, 0.25)),
        (ModelAverageAggregator(), column("weight", 0.5), Fleet(9), (0.3,)),
        (ModelAverageAggregator(rate=1.0), column("weight", 1.0, 0.5), Fleet(9), (0.5, 0.25)),
        (BufferedAggregator(), column("weight", 1.0, 0.5, 0.25), Fleet(9), (1 / 3, 1 / 6, 1 / 12)),
        (QuorumAggregator(weigh_by="examples"), column("examples", 10, 30), Fleet(9), (0.25, 0.75)),
        (QuorumAggregator(weigh_by="examples"), column("examples", 0, 0), Fleet(9), (0.5, 0.5)),
        (QuorumAggregator(), column("examples", 10, 30), Fleet(9), (0.5, 0.5)),
        (SynchronousAggregator(), column("local_steps", 4, 16, 16), Fleet(9), (1 / 3, 1 / 3, 1 / 3)),
        (
            BufferedAggregator(weigh_by="examples"),
            [contribution(weight=0.5), contribution(examples=30)],
            Fleet(9),
            (0.125, 0.75),
        ),
    ],
)
def test_weights_by_hand(aggregator, buffered, fleet, weights):
    assert aggregator.weights(buffered, fleet) == pytest.approx(weights, rel=1e-12)


contributions = st.lists(
    st.builds(
        contribution,
        weight=st.floats(0.0, 1.0),
        examples=st.integers(0, 2**53),
        local_steps=st.integers(1, 2**31),
    ),
    min_size=1,
    max_size=12,
)
averaging = st.builds(BufferedAggregator, weigh_by=st.sampled_from(["devices", "examples"]))
mixing = st.builds(ModelAverageAggregator, rate=st.floats(0.01, 1.0))


@given(averaging | mixing, contributions, st.permutations(range(12)))
def test_weights_are_a_part_of_a_whole_in_any_order(aggregator, buffered, order):
    fleet = Fleet(3, 1.0)
    weights = aggregator.weights(buffered, fleet)
    assert len(weights) == len(buffered)
    assert min(weights) >= 0.0
    assert math.fsum(weights) <= 1.0 + 1e-9
    order = [place for place in order if place < len(buffered)]
    assert aggregator.weights([buffered[place] for place in order], fleet) == tuple(weights[n] for n in order)


@given(averaging | mixing, contributions, st.floats(0.0, 1.0))
def test_a_stale_update_counts_less_and_what_it_loses_goes_to_nobody(aggregator, buffered, weight):
    first = buffered[0]
    stale = contribution(weight=first.weight * weight, examples=first.examples, local_steps=first.local_steps)
    fresh, aged = [aggregator.weights([one, *buffered[1:]], Fleet(3)) for one in (first, stale)]
    assert aged[0] <= fresh[0]
    assert aged[1:] == fresh[1:]


# -- one key, one vote -----------------------------------------------------------------------------------------

FIFTY = " ".join(f"k/{number}@{number / 100}" for number in range(50))


@pytest.mark.parametrize(
    ("aggregator", "spoken", "names", "live", "due_s"),
    [
        # Fifty names of one key are one vote of ten: no quorum, so the first update's patience ends first.
        (QuorumAggregator(), FIFTY, {"k": 50}, 10, 10.0),
        (QuorumAggregator(), f"{FIFTY} a@1 b@2 c@3 d@4 e@5", {"k": 50}, 10, 6.0),
        # A name that is silent holds nobody up for longer than any device does.
        (QuorumAggregator(), "k/0@1 a@2 b@3", {"k": 50}, 3, 4.0),
        # Names that have come and gone are no more than one vote.
        (QuorumAggregator(), "k/0@1 k/1@2 k/2@3", {}, 10, 11.0),
        # Four agents of one board alone: a quorum of them is three.
        (QuorumAggregator(), "k/0@1 k/1@2 k/2@3", {"k": 4}, 1, 4.0),
        (QuorumAggregator(), "k/0@1 k/1@2 k/2@3 k/3@3.5", {"k": 4}, 1, 3.5),
        (SynchronousAggregator(), "k/0@1 k/1@2 a@3", {"k": 3}, 2, None),
        (SynchronousAggregator(), "k/0@1 k/1@2 a@3 k/2@4", {"k": 3}, 2, 4.0),
        (SynchronousAggregator(share=0.2), f"{FIFTY} a@7", {"k": 50}, 9, 7.0),
    ],
)
def test_a_key_under_many_names_has_one_vote(aggregator, spoken, names, live, due_s):
    due = aggregator.flush_at_s(arrivals(spoken), Fleet(live, period_s=10.0, names=names))
    assert due == (None if due_s is None else pytest.approx(due_s))


@pytest.mark.parametrize("kind", [BufferedAggregator, QuorumAggregator, SynchronousAggregator])
def test_devices_of_one_key_share_its_part_of_the_mean(kind):
    buffered = [contribution(name) for name in ("k/0", "k/1", "k/2", "k/3", "a", "b")]
    weights = kind().weights(buffered, Fleet(3, names={"k": 4}))
    assert weights == pytest.approx([1 / 12] * 4 + [1 / 3] * 2)
    again = [contribution("a"), contribution("a"), contribution("b")]
    assert kind().weights(again, Fleet(2)) == pytest.approx([1 / 3] * 3), "two updates of one device are two"


# -- continued counts -------------------------------------------------------------------------------------------

FLEETS = [
    Fleet(3, 1.0),
    Fleet(3, 1.0, names={"a": 2}),
    Fleet(4, 1.0, names={"a": 2, "b": 3}, infrequent={"b/1": 1 / 3}),
    Fleet(2, 1.0, infrequent={"a/0": 1.0, "c/0": 1.0}),
]


@given(
    st.sampled_from([one for one in GATHERING if not isinstance(one, BufferedAggregator)]),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.sampled_from(FLEETS)), min_size=1, max_size=15
    ),
)
def test_continued_counts_lead_to_the_same_time_as_counts_from_the_start(aggregator, spoken):
    waiting = Waiting([])
    for at_s, (voter, number, fleet) in enumerate(spoken):
        waiting.append(contribution(f"{voter}/{number}", float(at_s), handle=at_s))
        assert aggregator.flush_at_s(waiting, fleet) == aggregator.flush_at_s(list(waiting), fleet)
        waiting.check(waiting[:], fleet)
