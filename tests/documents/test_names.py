"""Check that a public class has a name of its own in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "edgeasync"
TOOLBOX = {"Adam", "SGD", "Sequential"}
"""Names that programs for the toolbox `async_train` use, and torch before them."""


def test_no_public_class_has_the_name_of_another():
    homes = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(homes) > 500
    twice = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert set(twice) == TOOLBOX, twice
    for found in twice.values():
        assert [path.startswith("async_train/") for path in found] in ([True, False], [False, True])
