"""Failover: which hub a device tries next, and which sequence number it uses there."""

import pytest

from edgeasync.core.device.effects import Connect
from edgeasync.protocol.messages import Goodbye, Refuse
from tests.support.parts.device_bench import DeviceBench


def openings(device, count):
    """Tick until `count` connections were opened; return which hub each was to."""
    hubs = []
    for _ in range(count):
        device.until(Connect)
        hubs.append(device.core.hub)
    return hubs


def test_a_hub_that_does_not_answer_gives_way_to_the_next():
    device = DeviceBench(hubs=3)
    assert device.core.hub == 0
    assert openings(device, 5) == [1, 2, 0, 1, 2]


def test_every_hub_that_is_tried_is_told_of_once():
    device, told = DeviceBench(hubs=3), 0
    for _ in range(40):
        device.tick(device.core.next_deadline_s())
        told += device.told.count("waiting")
    assert told == 4


def test_a_list_of_hubs_is_tried_no_faster_than_one():
    device = DeviceBench(hubs=2)
    openings(device, 12)
    since_s = device.now_s
    openings(device, 10)
    assert 45.0 <= device.now_s - since_s <= 60.0


def test_a_hub_that_is_lost_is_tried_again_first():
    device = DeviceBench(hubs=2)
    assert openings(device, 1) == [1]
    device.welcome().hears(Goodbye("stopping"))
    assert openings(device, 3) == [1, 0, 1]


def test_a_full_hub_gives_way_at_once_and_is_not_asked_before_its_time():
    device = DeviceBench(hubs=2)
    full_s = device.now_s
    device.hears(Refuse("hub_full", "full", 30.0))
    assert openings(device, 1) == [1]
    assert device.now_s - full_s <= 0.1
    while device.core.hub == 1:
        openings(device, 1)
    assert 30.0 <= device.now_s - full_s <= 40.0
    device.welcome()
    assert device.core.link == "joined"


@pytest.mark.parametrize("code", ["quarantined", "duplicate_device_id"])
def test_what_a_device_has_done_is_not_escaped_by_another_hub(code):
    device = DeviceBench(hubs=2)
    device.hears(Refuse(code, "later", 30.0))
    assert openings(device, 1) == [0]
