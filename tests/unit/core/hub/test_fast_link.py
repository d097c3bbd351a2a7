"""Which links are fast, by what a device says of its host and by how quickly its bytes move."""

import pytest

from edgeasync.core.hub.fast_link import (
    FAST_BYTES_PER_S,
    FASTER_CYCLES,
    SAME_HOST_BYTES_PER_S_MIN,
    SLOWER_CYCLES,
    FastLink,
)

MEGABYTE = 1_000_000


def cycle(link, bytes_per_s, moved=MEGABYTE):
    link.begun_bytes = 7
    link.observe(7 + moved, moved / bytes_per_s)
    return link.is_fast


def test_a_device_on_the_hubs_machine_starts_fast_and_one_elsewhere_slow():
    link = FastLink()
    for same_host in (False, True, True, False):
        link.greet(same_host=same_host)
        assert link.is_fast == same_host


@pytest.mark.parametrize(("same_host", "least"), [(True, SAME_HOST_BYTES_PER_S_MIN), (False, FAST_BYTES_PER_S)])
def test_it_becomes_fast_soon_and_slow_late(same_host, least):
    link = FastLink()
    link.greet(same_host=same_host)
    link.is_fast = True
    slow = [cycle(link, 0.9 * least) for _ in range(SLOWER_CYCLES)]
    assert slow == [True] * (SLOWER_CYCLES - 1) + [False]
    fast = [cycle(link, 1.1 * least) for _ in range(FASTER_CYCLES)]
    assert fast == [False] * (FASTER_CYCLES - 1) + [True]


def test_one_quick_cycle_outweighs_those_that_a_busy_machine_slows_down():
    link = FastLink(same_host=True, is_fast=True)
    for _ in range(3):
        assert all(cycle(link, 1e6) for _ in range(SLOWER_CYCLES - 1))
        assert cycle(link, 1e9)


def test_short_cycles_and_those_without_time_say_nothing():
    link = FastLink(same_host=True, is_fast=True)
    for _ in range(2 * SLOWER_CYCLES):
        assert cycle(link, 1e6, moved=60_000)
        link.observe(9 * MEGABYTE, 0.0)
    assert link.cycles == 0


def test_the_same_host_again_does_not_undo_what_was_measured():
    link = FastLink()
    link.greet(same_host=True)
    for _ in range(SLOWER_CYCLES):
        cycle(link, 1e6)
    link.greet(same_host=True)
    assert not link.is_fast
