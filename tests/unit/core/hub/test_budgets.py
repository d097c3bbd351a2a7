"""The hub's side of a device's own limit of a day's bytes: whatever a device says of it."""

import math

import msgspec
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.hub.effects import HubReport
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import COUNT_MAX, DAY_S, DeviceProfile, Hello

MB = 1_000_000


@pytest.mark.parametrize(
    ("most", "left", "remaining_s", "shown"),
    [
        (0, MB, 60.0, (None, None)),
        (MB, 2 * MB, 60.0, (MB, MB)),
        (MB, 0, 60.0, (MB, 0)),
        (MB, MB, 1e9, (MB, MB)),
        (MB, 0, 0.0, (MB, MB)),
        (COUNT_MAX, COUNT_MAX, DAY_S, (COUNT_MAX, COUNT_MAX)),
        (1, 1, 1e-9, (1, 1)),
        (1, 0, 5e-324, (1, 1)),
    ],
)
def test_a_hub_takes_of_a_devices_day_what_can_be(hub_bench, most, left, remaining_s, shown):
    hub = hub_bench()
    hub.hello(
        profile=DeviceProfile(bytes_per_day_max=most, day_left_bytes=left, day_remaining_s=remaining_s), at_s=5.0
    )
    (device,) = hub.core.status(5.0)["devices"]
    assert (device["bytes_per_day_max"], device["day_left_bytes"]) == shown
    hub.fetch(at_s=5.0)
    hub.ping(at_s=6.0)
    (device,) = hub.core.status(5.0 + 3 * DAY_S)["devices"]
    assert device["day_left_bytes"] == (most or None), "the next day is whole, whenever it began"
    assert 0.0 <= device["rest_s"] <= DAY_S


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_day_max": -1},
        {"bytes_per_day_max": COUNT_MAX + 1},
        {"day_left_bytes": -1},
        {"day_left_bytes": math.nan},
        {"day_remaining_s": -1.0},
        {"day_remaining_s": math.nan},
        {"day_remaining_s": math.inf},
    ],
    ids=str,
)
def test_a_day_that_cannot_be_is_no_hello(wrong):
    profile = msgspec.structs.replace(DeviceProfile(), **wrong)
    header = wire.encode(Hello("a", bytes(16), 1, profile=profile))
    with pytest.raises(ProtocolError, match="Hello"):
        wire.decode(header)


@pytest.mark.parametrize("limit", ["device_bytes_per_day_max", "bytes_per_day_max"])
@pytest.mark.parametrize("remaining_s", [0.0, 1e-9, 0.05, 60.0, DAY_S])
def test_no_day_that_a_device_tells_is_a_way_round_its_hubs_limit(hub_bench, limit, remaining_s):
    hub = hub_bench(limits={limit: ByteCount(5 * MB)})
    profile = DeviceProfile(bytes_per_day_max=COUNT_MAX, day_left_bytes=COUNT_MAX, day_remaining_s=remaining_s)
    hub.hello()
    hub.core.budgets.count(hub.core.members.members["a"], (0, 5 * MB), 0.0)
    for start in range(2, 5):
        hub.hello(start=start, profile=profile, at_s=1.0 * start)
        hub.fetch(at_s=1.0 * start)
        assert hub.refusal.rest
        assert hub.refusal.retry_after_s == DAY_S - start


def test_a_limit_that_bears_no_exchange_of_so_many_devices_is_warned_of_once(hub_bench):
    hub = hub_bench(limits={"bytes_per_day_max": ByteCount(10 * MB)}, liveness={"heartbeat_s": 5.0})
    warned = []
    for number in [*range(1, 8), 5, 5]:
        hub.hello(f"d{number}")
        warned += [(number, each.detail) for each in hub.all_of(HubReport) if each.event == "warning"]
        if number == 5:
            hub.leave("d5")
    ((devices, said),) = warned
    assert devices == 5, "a device's pings take 2.2 MB of its day"
    assert "bytes_per_day_max is too low for 5 devices" in said
    hub.fetch("d1")
    assert hub.refusal.rest


def test_who_asks_for_the_status_changes_nothing_that_is_kept(hub_bench):
    hub = hub_bench()
    hub.hello(profile=DeviceProfile(bytes_per_day_max=MB, day_left_bytes=MB // 2, day_remaining_s=60.0))
    before = msgspec.msgpack.encode(hub.core.members.dump_state())
    hub.core.status(2 * DAY_S)
    assert msgspec.msgpack.encode(hub.core.members.dump_state()) == before


def test_a_device_whose_limit_was_raised_does_not_rest_by_the_old_one(hub_bench):
    hub = hub_bench()
    hub.hello(profile=DeviceProfile(bytes_per_day_max=MB, day_left_bytes=0, day_remaining_s=DAY_S))
    hub.fetch()
    assert hub.refusal.rest
    hub.hello(start=2, profile=DeviceProfile(), at_s=10.0)
    hub.fetch(at_s=10.0)
    assert hub.refused is None
