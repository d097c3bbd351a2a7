"""Writes SVG without scripts, fonts or links, so that a picture looks the same on the site and by itself."""

from collections.abc import Sequence
from html import escape

INK, QUIET, LINE, PAPER, FILL, BLUE, GREY, RED = (
    "#1c2733", "#5b6b7b", "#8796a5", "#fbfcfd", "#e4eef8", "#0b5fa5", "#aab7c4", "#b3402a",
)  # fmt: skip

STYLE = (
    "text{font:14px system-ui,'DejaVu Sans',sans-serif;fill:" + INK + "}"
    ".small{font-size:12px;fill:" + QUIET + "}.title{font-weight:600}.mid{text-anchor:middle}.end{text-anchor:end}"
)

ARROW = (
    '<defs><marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 1 L9 5 L0 9 z" fill="{INK}"/></marker></defs>'
)


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG on a light card, so that it can be read on a dark page too."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            ARROW,
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, css: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{css}"' if css else "") + f">{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, *, fill: str = FILL, line: str = LINE) -> str:
    """Return a rounded box by its upper left corner."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{fill}" stroke="{line}"/>'
    )
