"""The plans of all members fit: what one sends another receives, and each ends with everybody's segments."""

import pytest

from edgeasync.core.peer.plan import plan_round

COUNTS = pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 64])


def plans(topology, count):
    names = tuple([f"peer-{number:02}" for number in range(count)])
    return names, {name: plan_round(topology, names, name) for name in names}


@COUNTS
@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_what_one_sends_another_receives(topology, count):
    names, of = plans(topology, count)
    sent = {
        (step.step, name, receiver, step.segment)
        for name in names
        for step in of[name].outgoing
        for receiver in step.receivers
    }
    received = {
        (step.step, step.sender, name, step.segment)
        for name in names
        for step in of[name].incoming
        if not step.own
    }
    assert sent == received
    assert len(sent) == count * (2 * (count - 1) if topology == "ring" else count - 1)


@COUNTS
def test_in_all_to_all_everybody_adds_in_the_same_order(count):
    names, of = plans("all_to_all", count)
    for name, plan in of.items():
        assert [step.sender for step in plan.incoming] == list(names)
        assert [step.after for step in plan.incoming] == [None, *range(count - 1)]
        assert [step.sender for step in plan.incoming if step.own] == [name]
