"""docs/reference/training_graph.md names the operators with a gradient, and replacements for others."""

import re
from pathlib import Path

from edgeasync.autodiff.expansions import EXPANSIONS
from edgeasync.autodiff.rules import INSTEAD, RULES

DOCUMENT = Path(__file__).parents[2] / "docs/reference/training_graph.md"


def listed(begin):
    """Return the names in a sentence of the document, which are sorted."""
    (found,) = re.findall(rf"{begin}: (.+?)\. [A-Z]", " ".join(DOCUMENT.read_text().split()))
    names = [re.sub(r"\s*\(.*", "", part).strip() for part in re.split(r",(?![^(]*\))", found)]
    assert names == sorted(names)
    return set(names)


def test_the_document_names_the_operators_that_have_a_gradient():
    assert listed("There is a gradient for") == set(RULES)


def test_the_document_names_the_operators_that_are_replaced():
    standard, own = (
        {operator for domain, operator in EXPANSIONS if domain == given} for given in ("", "com.microsoft")
    )
    assert listed("These are replaced by operators of that list") == standard
    assert listed("Of the operators that onnxruntime's optimizer writes") == own


def test_the_document_and_the_refusals_name_the_same_replacements():
    rows = dict(re.findall(r"^\| (\w+) \| [^|]* \| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert {operator: rows[operator] for operator in INSTEAD} == INSTEAD
    assert not RULES.keys() & INSTEAD
