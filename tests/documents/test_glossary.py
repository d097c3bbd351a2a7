"""The glossary and the architecture speak of code that there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "edgeasync"
SOURCE = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/concepts/glossary.md").read_text().splitlines()
    if line.startswith("| ")
][1:]
FILES = sorted(set(re.findall(r"`([a-z_/0-9]+/[a-z_0-9]+\.py)`", (ROOT / "docs/architecture.md").read_text())))


def test_every_term_stands_once_and_in_order():
    terms = [term for term, *_ in ROWS]
    assert len(terms) >= 40
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "meaning", "names"), ROWS, ids=[row[0] for row in ROWS])
def test_a_term_names_code_that_there_is(term, meaning, names):
    assert meaning.endswith(".")
    found = re.findall(r"`(\w+)`", names)
    assert found
    for name in found:
        assert re.search(rf"^(class {name}\b|{name} = )", SOURCE, re.MULTILINE) or list(
            PACKAGE.rglob(f"{name}.py")
        )


@pytest.mark.parametrize("file", FILES)
def test_the_architecture_names_files_that_there_are(file):
    assert (PACKAGE / file).exists() or (ROOT / file).exists()
