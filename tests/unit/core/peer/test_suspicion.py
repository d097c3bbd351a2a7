"""Who is left out of rounds after one that did not become whole."""

import math

from edgeasync.core.peer.suspicion import DOUBLINGS_MAX, Suspicion
from edgeasync.protocol.peer_messages import Abandon, RoundId

LEASE_S = 10.0


def failed(blame, number, *accusations, now_s=0.0):
    """Note why each member gave a round up, and return who is left out for that."""
    for position, (accuser, reason, step, *awaited) in enumerate(accusations):
        abandon = Abandon(RoundId(number, "a", 1), reason, step, tuple(awaited))
        if position:
            blame.accuse(accuser, abandon)
        else:
            blame.begin(accuser, abandon, ("a", "b", "c", "d", "e"))
    return blame.judge(now_s)


def test_the_lowest_step_names_the_culprit():
    stalled = [("d", "stalled", 2, "c"), ("e", "stalled", 3, "d"), ("a", "stalled", 4, "e"), ("b", "stalled", 0)]
    assert failed(Suspicion(LEASE_S), 1, *stalled) == ["c"]
    assert failed(Suspicion(LEASE_S), 1, *reversed(stalled)) == ["c"]


def test_a_member_that_waits_for_its_own_trainer_names_itself():
    assert failed(Suspicion(LEASE_S), 1, ("d", "stalled", 0, "c"), ("c", "stalled", -1, "c")) == ["c"]


def test_a_round_that_lost_a_member_has_no_other_culprit():
    assert failed(Suspicion(LEASE_S), 1, ("d", "stalled", 0, "c"), ("e", "lost", -1, "c")) == []
    assert failed(Suspicion(LEASE_S), 1, ("c", "left", 0), ("d", "stalled", 0, "c")) == []


def test_a_member_that_accuses_a_second_one_is_left_out_too():
    blame = Suspicion(LEASE_S)
    assert failed(blame, 1, ("d", "stalled", 0, "c")) == ["c"]
    assert failed(blame, 2, ("d", "stalled", 0, "c")) == ["c"]
    assert failed(blame, 3, ("d", "stalled", 0, "b")) == ["b", "d"]
    blame.forgive(("a", "b", "c", "d"))
    assert failed(blame, 4, ("d", "stalled", 0, "a")) == ["a"]


def test_a_culprit_is_left_out_for_longer_each_time_until_a_round_is_whole():
    blame, now_s, times_s = Suspicion(LEASE_S), 0.0, []
    for number in range(DOUBLINGS_MAX + 3):
        failed(blame, number, ("d", "stalled", 0, "c"), now_s=now_s)
        until_s = next(at_s for at_s in map(float, range(int(now_s), 10**5)) if not blame.leaves_out("c", at_s))
        times_s.append(until_s - now_s)
        now_s = until_s
    assert times_s == [LEASE_S * 2 ** min(doublings, DOUBLINGS_MAX) for doublings in range(len(times_s))]
    assert not blame.leaves_out("d", now_s)
    failed(blame, 99, ("d", "stalled", 0, "c"), now_s=now_s)
    blame.forgive(("c",))
    assert not blame.leaves_out("c", now_s)


def test_proposals_of_a_culprit_are_declined_from_the_second_time_on():
    blame = Suspicion(LEASE_S)
    for number, declines in enumerate((False, True, True)):
        failed(blame, number, ("d", "stalled", 0, "c"))
        assert blame.leaves_out("c", LEASE_S / 2)
        assert blame.declines("c", LEASE_S / 2) == declines
    assert not blame.declines("c", 8 * LEASE_S)


def test_only_the_last_round_is_judged_and_only_once():
    blame = Suspicion(LEASE_S)
    blame.accuse("d", Abandon(RoundId(1, "a", 1), "stalled", 0, ("c",)))
    assert failed(blame, 2, ("d", "stalled", 0, "b")) == ["b"]
    assert blame.judge(0.0) == []
    assert not blame.leaves_out("c", -math.inf)
