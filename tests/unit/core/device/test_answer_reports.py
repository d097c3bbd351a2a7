"""The device warns its user of trouble in the hub's answers once, until it is over."""

import pytest

from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.device.events import ModelInstalled
from edgeasync.protocol.messages import Ack, Applied, Duplicate, Refuse, Rejected
from tests.support.parts.device_bench import DeviceBench, assignment

DIVERGED, BEHIND = Rejected("not_finite"), Rejected("behind", preempted=True)


@pytest.mark.parametrize(
    "outcomes",
    [[DIVERGED, DIVERGED, Applied(3), DIVERGED], [BEHIND, BEHIND, Rejected("behind"), BEHIND]],
    ids=["diverged", "starts over"],
)
def test_what_is_wrong_with_updates_is_told_once_until_it_is_over(outcomes):
    device = DeviceBench().training()
    told = []
    for seq, outcome in enumerate(outcomes, start=1):
        device.trained()
        device.assigned(4, Ack(seq, outcome))
        told.append([effect.event for effect in device.effects if isinstance(effect, DeviceReport)])
        device.give(ModelInstalled(assignment(4, Ack(seq, outcome))))
    assert told == [["answered", "warning"], ["answered"], ["answered"], ["answered", "warning"]]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_quarantine_is_told_once_and_so_is_its_end(repeated):
    device = DeviceBench().training()
    told = []
    for seq, outcome in enumerate([Rejected("quarantined")] * 2 + [Applied(3)] * 2, start=1):
        device.trained()
        ack = Ack(seq, Duplicate(outcome) if repeated else outcome)
        device.assigned(4, ack)
        told += [
            effect for effect in device.effects if isinstance(effect, DeviceReport) and effect.event != "answered"
        ]
        device.give(ModelInstalled(assignment(4, ack)))
    assert told == [
        DeviceReport(
            "quarantined",
            "an operator of the hub has excluded this device; it continues training, but its updates do not count",
        ),
        DeviceReport("released", "this device's updates count again"),
    ]


def test_a_device_that_is_put_aside_says_why_and_until_when():
    device = DeviceBench().welcome()
    device.hears(Refuse("quarantined", "pi-1 sent too much that is malformed", 30.0))
    assert [(effect.event, effect.detail) for effect in device.effects if isinstance(effect, DeviceReport)] == [
        ("warning", "pi-1 sent too much that is malformed"),
        ("quarantined", "pi-1 sent too much that is malformed; retrying in 30 s"),
        ("disconnected", "pi-1 sent too much that is malformed"),
    ]
