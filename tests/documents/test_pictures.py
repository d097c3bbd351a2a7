"""The pictures that follow from code are up to date."""

import pytest

from docs.draw import PICTURES, drawings, layers
from docs.svg import STYLE
from docs.wake_word import PICTURE, draw

DRAWINGS = drawings()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_is_what_is_drawn_today(name):
    assert (PICTURES / name).read_text("utf-8") == DRAWINGS[name](), "run python -m docs.draw"


def test_the_picture_of_the_wake_word_shows_the_stored_figures():
    assert PICTURE.read_text("utf-8") == draw(), "run python -m docs.wake_word"


@pytest.mark.parametrize("name", sorted({path.name for path in PICTURES.glob("*.svg")} - {"demo.svg"}))
def test_a_picture_has_the_style_of_all(name):
    assert f"<style>{STYLE}</style>" in (PICTURES / name).read_text("utf-8")


def test_every_layer_of_the_contract_is_drawn():
    assert layers()[:2] == [["async_train"], ["cli"]]
    assert layers()[-1] == ["errors", "file_lock", "regular_file", "structs", "version"]
