from random import Random

from edgeasync.core.engine.clock import OffsetClock


class Source:
    """A clock that is moved by hand, and another that advances with it."""

    def __init__(self, began_s, first_s):
        self.now_s = began_s
        self.shown = OffsetClock(lambda: self.now_s, first_s)


def drawn():
    """Yield times at which a clock began and what it showed first, of many magnitudes, and a random generator."""
    for seed in range(200):
        random = Random(seed)
        began_s, first_s = (random.uniform(0.0, random.choice([1e-3, 10.0, 1e6])) for _ in range(2))
        yield began_s, first_s, random


def test_it_goes_on_from_where_it_stood():
    source = Source(100.0, 7.0)
    assert source.shown() == 7.0
    source.now_s = 102.5
    assert source.shown() == 9.5
    assert source.shown.when(12.0) == 105.0


def test_it_never_goes_back_not_even_by_a_rounding():
    for began_s, first_s, random in drawn():
        source, before_s = Source(began_s, first_s), first_s
        for passed_s in [0.0, *(10.0 ** -random.uniform(0.0, 18.0) for _ in range(20))]:
            source.now_s += passed_s
            assert source.shown() >= before_s
            before_s = source.shown()


def test_what_is_due_is_due_when_it_says():
    for began_s, first_s, random in drawn():
        source = Source(began_s, first_s)
        for _ in range(20):
            due_s = first_s + 10.0 ** -random.uniform(0.0, 18.0)
            source.now_s = source.shown.when(due_s)
            assert source.now_s >= began_s
            assert due_s <= source.shown() <= due_s + 1e-15 * (began_s + first_s + 1.0)
