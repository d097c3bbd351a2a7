"""The hub compares a device's frozen arrays with its own, or with those of the first device that joined."""

import pytest

from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Revoked
from edgeasync.core.recovery.state import dump_state, load_state, succeed
from edgeasync.protocol.messages import Frozen
from tests.support.parts.hub_bench import SPEC, HubBench

RIGHT, OTHER, ONNX = Frozen("torch", "a" * 32), Frozen("torch", "b" * 32), Frozen("onnx", "c" * 32)


def hello(hub, device_id, frozen, **fields):
    return hub.hello(device_id, **{"layout": SPEC.layout, "frozen": frozen} | fields)


def warnings(hub):
    return [(each.device_id, each.detail) for each in hub.all_of(HubReport) if each.event == "warning"]


def test_the_hubs_own_arrays_are_right():
    hub = HubBench(frozen_arrays=RIGHT)
    hello(hub, "a", OTHER)
    assert hub.refusal.code == "model_mismatch"
    assert "frozen arrays of a, which are not transmitted, differ from the hub's: load" in hub.refusal.sentence
    assert "frozen = 'warn'" in hub.refusal.sentence
    assert not hub.core.members.members
    hello(hub, "a", RIGHT)
    assert not warnings(hub)
    assert set(hub.core.members.members) == {"a"}


def test_else_those_of_the_first_device_are():
    hub = HubBench()
    hello(hub, "a", RIGHT)
    hello(hub, "b", OTHER)
    assert "differ from those of a, the first device" in hub.refusal.sentence
    hello(hub, "c", RIGHT)
    hub.leave("a")
    hello(hub, "a", OTHER, start=2)
    assert "differ from those it joined with before" in hub.refusal.sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"frozen": None},
        {"frozen": None, "layout": None},
        {"layout": None},
        {"layout": "0" * 32},
        {"frozen": ONNX},
    ],
    ids=["no frozen arrays", "an agent with the hub's model", "no layout", "another model", "another framework"],
)
def test_who_is_not_compared(fields):
    """A device with another model, or with other names in it, says itself what is wrong."""
    for hub in (HubBench(frozen_arrays=RIGHT), HubBench()):
        hub.hello("z", **{"layout": SPEC.layout, "frozen": OTHER} | fields)
        assert set(hub.core.members.members) == {"z"}
        hello(hub, "a", RIGHT)
        assert set(hub.core.members.members) == {"a", "z"}, "nor is anybody compared with it"


def test_a_warning_once_for_each_device():
    hub = HubBench(frozen="warn")
    hello(hub, "a", RIGHT)
    hello(hub, "b", OTHER)
    ((device, detail),) = warnings(hub)
    assert device == "b"
    assert "differ from those of a, the first device; it may train because" in detail
    hello(hub, "b", OTHER, start=2)
    assert not warnings(hub), "said already"
    hello(hub, "c", OTHER)
    assert len(warnings(hub)) == 1
    assert set(hub.core.members.members) == {"a", "b", "c"}


def test_the_hub_says_once_whom_it_refuses():
    hub = HubBench(frozen_arrays=RIGHT)
    hello(hub, "a", OTHER)
    ((device, detail),) = warnings(hub)
    assert (device, detail) == ("a", f"refused: {hub.refusal.sentence}")
    hello(hub, "a", OTHER)
    assert not warnings(hub)
    hub.hello("a", fingerprint="0" * 32)
    assert len(warnings(hub)) == 1, "another reason"


@pytest.mark.parametrize("policies_stay", [True, False])
def test_what_the_first_device_had_survives_a_restart(policies_stay):
    hub = HubBench()
    hello(hub, "a", RIGHT)
    again = HubBench()
    if policies_stay:
        load_state(again.core, dump_state(hub.core))
    else:
        succeed(again.core, hub.core)
    hello(again, "b", OTHER)
    assert again.refusal.code == "model_mismatch"


def test_a_revoked_device_no_longer_says_what_is_right():
    hub = HubBench()
    hub.keys = {"a": b"k" * 32}
    hello(hub, "a", RIGHT)
    hub.core.handle(Revoked(b"k" * 32), 0.0)  # which is no message
    hello(hub, "b", OTHER)
    assert "b" in hub.core.members.members
