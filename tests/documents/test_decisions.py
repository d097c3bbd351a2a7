"""The index of decisions names each of them once, by its title."""

import re

from tests.support.pages.documents import ROOT

INDEX = (ROOT / "docs/develop/decisions.md").read_text("utf-8")


def test_the_index_has_every_decision_once_by_its_title():
    listed = sorted(re.findall(r"^- \[(\d+)\]\(\.\./decisions/([^)]+)\): (.+)$", INDEX, re.MULTILINE))
    pages = []
    for page in sorted((ROOT / "docs/decisions").glob("*.md")):
        number, title = re.fullmatch(r"# (\d+): (.+)", page.read_text("utf-8").splitlines()[0]).groups()
        pages.append((number, page.name, title))
    assert listed == pages
