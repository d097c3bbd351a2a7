"""The language model of the example, in its own and in smaller sizes."""

import runpy

from tests.support.pages.documents import ROOT

_MAKER = runpy.run_path(str(ROOT / "examples/small_lm/make_model.py"))

SMALL = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "key_value_heads": 2}
"""Sizes of a toy. Two sizes have no default here: those of texts."""


def language_model(*, vocabulary, tokens, **sizes):
    """Return a model of the toy's sizes, but for those in `sizes`."""
    return _MAKER["make_model"](_MAKER["Shape"](**SMALL | sizes, vocabulary=vocabulary, tokens=tokens))
