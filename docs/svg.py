"""Writes SVG without scripts, fonts or links, so that a picture looks the same on the site and by itself."""

from collections.abc import Sequence
from html import escape

INK, QUIET, LINE, PAPER, FILL, BLUE, GREY, RED, GREEN = (
    "#1c2733", "#5b6b7b", "#8796a5", "#fbfcfd", "#e4eef8", "#0b5fa5", "#aab7c4", "#b3402a", "#2e7d4f",
)  # fmt: skip

DARK = {
    INK: "#d7dfe7", QUIET: "#9aa9b8", LINE: "#6b7a89", PAPER: "#131a21", FILL: "#22384e", BLUE: "#6db3f2",
    GREY: "#55636f", RED: "#e98a74", GREEN: "#74c796",
}  # fmt: skip
"""From each colour to the one that takes its place for readers who prefer dark pages."""


def _classes(colours: dict[str, str]) -> str:
    """Return the rules of the classes that set a colour, with these colours in place of the light ones."""
    ink, quiet, line, paper, fill, blue, red, green = (
        colours.get(each, each) for each in (INK, QUIET, LINE, PAPER, FILL, BLUE, RED, GREEN)
    )
    return (
        f"text{{fill:{ink}}}.small{{fill:{quiet}}}.box{{fill:{fill};stroke:{line}}}.up{{stroke:{blue}}}"
        f".down{{stroke:{green}}}.crash{{fill:{paper};stroke:{red}}}.red{{fill:{red}}}"
    )


STYLE = (
    "text{font:14px system-ui,'DejaVu Sans',sans-serif}.small,.red{font-size:12px}.title,.red{font-weight:600}"
    ".mid{text-anchor:middle}.end{text-anchor:end}.way{fill:none;stroke-width:2}.crash{stroke-width:1.6}"
    + _classes({})
    + "@media(prefers-color-scheme:dark){"
    + "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    )
    + _classes(DARK)
    + "}"
)
"""Of all pictures, also those drawn by hand. A reader who prefers dark pages sees the dark colours."""

ARROW = (
    '<defs><marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 1 L9 5 L0 9 z" fill="{INK}"/></marker></defs>'
)


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG on a card of its own, light or dark as the reader prefers."""
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
