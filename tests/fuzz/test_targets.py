"""Damaged inputs, drawn by a seed, at everything that reads bytes of others; and all that was ever found.

`python -m tests.fuzz` runs far more of them, and looks at time and memory, too.
"""

from pathlib import Path

import pytest

from tests.fuzz.running import attempt, run
from tests.fuzz.targets import TARGETS
from tests.support.size import repetitions

FINDINGS = sorted(Path(__file__).with_name("findings").glob("*"))
"""Files named TARGET.WHAT: what some version took badly."""

FAST = ("wire", "payload", "allow-list", "token", "history", "entry", "state", "graph")
"""Targets whose cases take less than a tenth of a millisecond: eight times as many are tried."""

SLOW = (
    *("handshake", "plain-handshake", "model", "enrolling", "record", "machine"),
    *("own-loss", "exported", "evaluated"),
)
"""Targets whose cases take most: a fourth as many are tried. All targets together take ten seconds in the gate."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.process] * name.endswith("handshake")) for name in TARGETS],
)
def test_whatever_is_read_is_taken_or_refused(name):
    cases = repetitions("cases of a reader of bytes") * 8 ** (name in FAST) // 4 ** (name in SLOW)
    with TARGETS[name]() as target:
        if not name.endswith("handshake"):
            assert all(attempt(target, content) == (True, "") for content in target.inputs)
        result = run(target, name, "0", cases)
    assert result.cases == cases
    for finding in result.findings:
        pytest.fail(
            f"python -m tests.fuzz --target {name} --seed 0 --first {finding.number} --cases 1\n{finding.what}"
        )


def test_what_was_found_is_found_no_more():
    for path in FINDINGS:
        with TARGETS[path.name.partition(".")[0]]() as target:
            assert attempt(target, path.read_bytes())[1] == "", path
