"""docs/reference/training_graph.md names the operators with a gradient, and replacements for others."""

import re
from pathlib import Path

from edgeasync.autodiff.rules import INSTEAD, RULES

DOCUMENT = Path(__file__).parents[2] / "docs/reference/training_graph.md"


def test_the_document_names_the_operators_that_have_a_gradient():
    (listed,) = re.findall(r"There is a gradient for: (.+?)\. Comparisons", " ".join(DOCUMENT.read_text().split()))
    names = [re.sub(r"\s*\(.*", "", part).strip() for part in re.split(r",(?![^(]*\))", listed)]
    assert names == sorted(names)
    assert set(names) == set(RULES)


def test_the_document_and_the_refusals_name_the_same_replacements():
    rows = dict(re.findall(r"^\| (\w+) \| [^|]* \| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert {operator: rows[operator] for operator in INSTEAD} == INSTEAD
    assert not RULES.keys() & INSTEAD
