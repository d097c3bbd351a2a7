"""Draw lines on two logarithmic scales."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.records import Record, Table
from docs.svg import BLUE, GREY, INK, QUIET, RED, picture, text

Points = Sequence[tuple[float, float]]

EACH, HEIGHT = 380, 260
LINE = 14.0
"""The height of a line of text."""

LEFT, RIGHT, TOP, BOTTOM = 56, 116, 44, 40
COLOURS = (BLUE, INK, RED, GREY, QUIET)


@dataclass(frozen=True)
class Curves:
    """Panels side by side, each with its lines by name."""

    title: str
    panels: Mapping[str, Mapping[str, Points]]
    note: str


def scale(record: Record) -> Curves:
    """Return costs and slowest events of `scale`, for the core alone and for real sockets."""
    mean, slowest = (record.figures[f"the core alone, {which}"] for which in ("mean", "slowest"))
    pushes = record.figures["pushes of 4 KB, real sockets"]
    pings = record.figures["joins and pings, real sockets"]
    return Curves(
        "What a message costs as the fleet grows",
        {
            "processor, us an event": {
                "flush": _points(mean, "flush, us"),
                "push": _points(mean, "push, us"),
                "ping": _points(mean, "ping, us"),
                "push, sockets": _points(pushes, "hub CPU a push, us"),
                "ping, sockets": _points(pings, "hub CPU a ping, us"),
            },
            "slowest, ms": {
                "event": _points({row: {"most": _most(columns)} for row, columns in slowest.items()}, "most"),
                "flush": _points(slowest, "flush, ms"),
                "event, sockets": _points(pushes, "slowest event, ms"),
                "lag p99, pushes": _points(pushes, "lag p99, ms"),
                "lag p99, pings": _points(pings, "lag p99, ms"),
            },
        },
        "By number of devices. Sockets: all of the hub, not the core alone.",
    )


def draw_curves(curves: Curves) -> str:
    """Draw panels of lines, each with its name at its right end."""
    parts = []
    for place, (title, lines) in enumerate(curves.panels.items()):
        parts.append(text(EACH * place + LEFT, 26, title, "title"))
        parts += _panel(EACH * place, lines)
    parts.append(text(16, HEIGHT + 24, curves.note, "small"))
    return picture(EACH * len(curves.panels), HEIGHT + 40, curves.title, parts)


def _panel(begin: int, lines: Mapping[str, Points]) -> list[str]:
    points = [point for line in lines.values() for point in line]
    across = _Scale([x for x, _ in points], begin + LEFT, begin + EACH - RIGHT)
    up = _Scale([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = []
    for x in across.ticks():
        parts.append(f'<path d="M{across(x):.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="{GREY}" stroke-width="0.6"/>')
        parts.append(text(round(across(x), 1), HEIGHT - BOTTOM + 18, f"{x:,g}", "small mid"))
    for y in up.ticks():
        parts.append(
            f'<path d="M{begin + LEFT} {up(y):.1f} H{begin + EACH - RIGHT}" stroke="{GREY}" stroke-width="0.6"/>'
        )
        parts.append(text(begin + LEFT - 8, round(up(y) + 4, 1), f"{y:,g}", "small end"))
    names = _apart({name: up(line[-1][1]) for name, line in lines.items() if line})
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        if not line:
            continue
        places = [f"{across(x):.1f},{up(y):.1f}" for x, y in line]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (p.split(",") for p in places)]
        words = text(begin + EACH - RIGHT + 10, round(names[name] + 4, 1), name, "small")
        parts.append(words.replace(' class="small"', f' class="small" style="fill:{colour}"'))
    return parts


class _Scale:
    """A logarithmic scale between two positions in the picture."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self._low, self._high = (math.log10(pick(values)) for pick in (min, max))
        self._span = max(self._high - self._low, 0.1)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (self._end - self._begin) * (math.log10(value) - self._low) / self._span

    def ticks(self) -> list[float]:
        """Return the powers of ten on the scale."""
        return [10.0**power for power in range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)]


def _apart(places: Mapping[str, float]) -> dict[str, float]:
    """Move labels apart, from top to bottom, so that they do not overlap."""
    found: dict[str, float] = {}
    last = -math.inf
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        found[name] = last = max(place, last + LINE)
    return found


def _points(rows: Table, column: str) -> Points:
    """Return a column as points over the numbers that begin the row names.

    A value of 0 is omitted, because a logarithmic scale cannot show it.
    """
    values = [(float(name.split()[0].replace(",", "")), row.get(column)) for name, row in rows.items()]
    return [(number, value) for number, value in values if value is not None and value > 0]


def _most(columns: Mapping[str, float | None]) -> float:
    return max(value for value in columns.values() if value is not None)
