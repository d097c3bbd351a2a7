"""The commands and the Python on every page work, and say what the page shows."""

import pytest

from tests.support.pages.documents import PAGES, ROOT, Reader, missing, runs

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "page", [page for page in PAGES if runs(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_works(page, tmp_path):
    if lacks := missing(page):
        pytest.skip(f"{', '.join(sorted(lacks))} is missing")
    with Reader(tmp_path) as reader:
        reader.follow(page)
