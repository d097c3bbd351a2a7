"""The changed members: urgent ones first, then the oldest, a limited number at a time."""

from edgeasync.core.hub.changes import Changes


def test_urgent_changes_come_first_and_others_in_order():
    changes = Changes()
    for name in ("a", "b", "c", "a"):
        changes.note(name)
    changes.note("c", urgent=True)
    changes.note("c")
    assert len(changes) == 3
    assert changes.take(2) == ["c", "a"]
    changes.note("a")
    assert changes.take(10) == ["b", "a"]
    assert (changes.take(10), len(changes)) == ([], 0)
