"""The site of the documentation: `python -m sphinx -W --keep-going docs build/docs` builds it, without network."""

import sys
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs import generated
from edgeasync.version import VERSION

project = "edgeasync"
copyright = "the authors of edgeasync"  # noqa: A001 - the name that Sphinx has for it
release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc"]
nitpicky = False
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"

smartquotes = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"edgeasync {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6db3f2", "color-brand-content": "#6db3f2"},
}


SHORT = 26
"""Characters of code that stay on one line."""


def fill(_: Sphinx, __: str, source: list[str]) -> None:
    """Put what is generated into a page."""
    source[0] = generated.fill(source[0])


def mark_short_code(_: Sphinx, page: nodes.document) -> None:
    """Mark code of few characters, which the stylesheet keeps in one piece."""
    for code in page.findall(nodes.literal):
        if len(code.astext()) <= SHORT:
            code["classes"].append("short")


def setup(site: Sphinx) -> None:
    """Have every page filled when it is read; name what the wire protocol's examples are written in."""
    site.add_lexer("hex", TextLexer)
    site.add_lexer("payload", TextLexer)
    site.connect("source-read", fill)
    site.connect("doctree-read", mark_short_code)
