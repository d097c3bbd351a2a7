import pytest

from edgeasync.core.hub.link import BANDWIDTH_MAX_BYTES_PER_S, LinkEstimate
from edgeasync.protocol.messages import Ping


def cycle(link, up, down, communication_s):
    link.begin_cycle()
    link.bytes_up += up
    link.bytes_down += down
    link.end_cycle(communication_s)


def test_bandwidth_is_what_a_cycle_moved_in_its_talking_less_a_round_trip():
    link = LinkEstimate()
    link.observe_ping(0.5)
    cycle(link, 600_000, 400_000, 2.5)
    assert (link.round_trip_s, link.bandwidth_bytes_per_s) == (0.5, 500_000)


@pytest.mark.parametrize(("nbytes", "communication_s"), [(65_535, 1.0), (10**9, 0.5), (10**9, 0.0), (10**9, -1.0)])
def test_cycles_that_tell_nothing_are_left_out(nbytes, communication_s):
    link = LinkEstimate()
    link.observe_ping(0.5)
    cycle(link, nbytes, 0, communication_s)
    assert link.bandwidth_bytes_per_s == 0.0


def test_of_the_last_five_the_usual_ping_and_the_best_cycle():
    link = LinkEstimate()
    for number in (900, 900, 9, 1, 2, 3, 4, 100):
        link.observe_ping(number / 10)
        cycle(link, number * 1_000_000, 0, 1.0 + link.round_trip_s)
    assert link.round_trip_s == 0.3
    assert link.bandwidth_bytes_per_s == pytest.approx(100e6)


def test_a_ping_without_a_measurement_is_none():
    link = LinkEstimate()
    link.observe_ping(0.0)
    assert link.round_trip_s == 0.0


def test_a_full_window_tells_its_rate_once():
    link = LinkEstimate()
    window = link.window(1 << 20, narrow=False)
    window.observe_full(1_000_000, 0.5)
    for _ in range(3):
        link.observe_window(window)
    assert link.bandwidth_bytes_per_s == 2e6
    window.observe_full(1_000_000, 0.0)
    link.observe_window(window)
    assert link.bandwidth_bytes_per_s <= BANDWIDTH_MAX_BYTES_PER_S


def test_windows_that_are_long_past_tell_nothing_any_more():
    link = LinkEstimate()
    window = link.window(1 << 20, narrow=False)
    for _ in range(3):
        window.observe_full(1_000_000, 0.1)
        link.observe_window(window)
    for count in range(8):
        assert link.bandwidth_bytes_per_s == (10e6 if count < 7 else pytest.approx(2e6)), count
        cycle(link, 2_000_000, 0, 1.0)


def test_the_window_is_kept_over_connections_and_made_anew_for_other_pieces():
    link = LinkEstimate()
    window = link.window(1 << 20, narrow=False)
    assert link.window(1 << 20, narrow=False) is window
    assert window.bytes == 1 << 18
    assert link.window(1 << 16, narrow=True).bytes == 1 << 16


def test_a_clock_is_compared_half_a_round_trip_after_its_ping_was_sent():
    link = LinkEstimate()
    link.observe_clock(Ping(b"s" * 16, 1.0, 2), 1e9)
    assert link.clock_offset_s is None
    link.observe_clock(Ping(b"s" * 16, 1.0, 2, 0.5, clock_s=1e9 - 60.25), 1e9)
    assert link.clock_offset_s == -60.0
    link.observe_clock(Ping(b"s" * 16, 1.0, 2), 2e9)
    assert link.clock_offset_s == -60.0
