"""For how long proposals of a proposer are declined whose rounds fail."""

from edgeasync.core.peer.backoff import DOUBLINGS_MAX, FREE, Backoff

LEASE_S = 10.0


def test_some_failed_rounds_are_free_and_each_further_one_doubles_the_wait():
    backoff, waits_s = Backoff(LEASE_S), []
    for _ in range(FREE + DOUBLINGS_MAX + 3):
        backoff.note_failed("a", 100.0)
        waits_s.append(max(0.0, backoff.until_s("a") - 100.0))
    assert waits_s[:FREE] == [0.0] * FREE
    doublings = range(len(waits_s) - FREE)
    assert waits_s[FREE:] == [LEASE_S * 2 ** min(doubling, DOUBLINGS_MAX) for doubling in doublings]


def test_each_proposer_waits_for_its_own_failures_until_a_round_with_it_is_whole():
    backoff = Backoff(LEASE_S)
    for _ in range(FREE + 1):
        backoff.note_failed("a", 0.0)
    assert backoff.until_s("b") == 0.0
    backoff.note_whole(("b", "c"))
    assert backoff.until_s("a") == LEASE_S
    backoff.note_whole(("a", "b"))
    backoff.note_failed("a", 0.0)
    assert backoff.until_s("a") == 0.0
