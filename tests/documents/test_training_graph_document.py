"""docs/training_graph.md names every operator that has a gradient, and no other."""

import re
from pathlib import Path

from edgeasync.autodiff.rules import RULES

DOCUMENT = Path(__file__).parents[2] / "docs" / "training_graph.md"


def test_the_document_names_the_operators_that_have_a_gradient():
    (listed,) = re.findall(r"There is a gradient for: (.+?)\. Comparisons", DOCUMENT.read_text(), re.DOTALL)
    names = [re.sub(r"\s*\(.*", "", part).strip() for part in re.split(r",(?![^(]*\))", listed)]
    assert names == sorted(names)
    assert set(names) == set(RULES)
