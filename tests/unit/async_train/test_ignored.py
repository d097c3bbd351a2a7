"""Ignored arguments are reported once."""

from edgeasync.async_train.ignored import ignore


def test_what_is_ignored_is_said_once(caplog):
    for _ in range(2):
        ignore("test_ignored", "nothing needs it", one=1, two=None)
    assert [record.getMessage() for record in caplog.records] == ["test_ignored: one is ignored: nothing needs it"]
