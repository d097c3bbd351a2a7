"""Flags: a value that was given counts, a zero too."""

from edgeasync.cli.options import given


def test_a_zero_was_given_and_an_empty_list_was_not():
    not_given = {"hub": None, "insecure": False, "local": []}
    said = {"threads": 0, "step_s_min": 0.0, "spool": "", "knocking": True, "train": ["head.*"]}
    assert given(**not_given, **said) == said
