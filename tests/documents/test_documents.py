"""Every block of commands or Python on a page says whether it is run."""

import pytest

from tests.support.pages.documents import PAGES, ROOT, blocks, masked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_is_done_with_it(page):
    for block in blocks(page):
        assert block.mark or block.language == "toml", f"nothing stands above:\n{block.code}"
        if block.mark.startswith("run"):
            assert block.how


def test_numbers_are_masked_and_words_are_not():
    assert masked("version 12,  loss 3.4e-05: device-1") == "version #, loss # #"
