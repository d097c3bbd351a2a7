"""Generate the pages and pictures of docs/results from benchmarks/results.

Pages are written by hand except for the part between two marks, which comes from the benchmark's
record. Without a record, `plot` leaves that part unchanged.
"""

import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plot_curves import draw_curves, scale
from benchmarks.records import Record, Table, read_records
from benchmarks.report import BOUND, number
from benchmarks.surroundings import ROOT
from docs.generated import table
from docs.svg import BLUE, GREY, INK, QUIET, RED, picture, text

DOCS = ROOT / "docs"
BEGIN = "<!-- measured: python -m benchmarks plot writes this part -->"
END = "<!-- measured: end -->"

WIDTH = 720
LETTER = 6.5
"""Approximate width of a letter in small text."""


def plot() -> int:
    """Write all pages and pictures and print the age of each record; return the exit code."""
    records = read_records()
    for path, content in make_files(records).items():
        path.write_text(content, encoding="utf-8")
    for name, record in records.items():
        print(f"{name:20} {record.form:5}  {record.date}  {record.commit}{_changed_since(record.commit)}")
    return 0


def make_files(records: Mapping[str, Record], docs: Path = DOCS) -> dict[Path, str]:
    """Return the content of every page and picture that depends on the records, by path."""
    found: dict[Path, str] = {}
    for name, record in records.items():
        drawn = {docs / "results" / f"{name}-ratios.svg": draw_ratios(record)}
        if name == "policies":
            drawn[docs / "pictures/time-to-target.svg"] = draw_bars(time_to_target(record))
        if name == "scale":
            drawn[docs / "results/scale-curves.svg"] = draw_curves(scale(record))
        page = docs / "results" / f"{name}.md"
        shown = [os.path.relpath(path, page.parent) for path in reversed(drawn)]
        found |= drawn | {page: _fill(page, _measured(record, shown))}
    index = docs / "results/index.md"
    return found | {index: _fill(index, _list(records, docs))}


def _fill(page: Path, part: str) -> str:
    """Return a page with a new part between its marks."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def _changed_since(commit: str) -> str:
    """Describe how many commits have changed the code since a commit.

    Empty if none has, or if git does not know the commit.
    """
    command = ["git", "rev-list", "--count", f"{commit.removesuffix('-dirty')}..HEAD", "--", "edgeasync"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    count = done.stdout.strip()
    return f"  edgeasync/ has changed in {count} commits since" if count not in {"", "0"} else ""


# -- pages ------------------------------------------------------------------------------------------------------


def _measured(record: Record, pictures: Sequence[str]) -> str:
    """Return the generated part of a page."""
    commit = record.commit.removesuffix("-dirty")
    dirty = ", with changes that were not committed" if commit != record.commit else ""
    flag = " --short" if record.form == "short" else ""
    machine = ", ".join(str(value) for key, value in record.machine.items() if key != "cores")
    versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    commands = f"git checkout {commit}", f"python -m benchmarks run --only {record.benchmark}{flag}"
    facts = {
        "measured": f"{record.date}, {record.form} run of {number(record.seconds)} s",
        "commit": f"`{commit}`{dirty}",
        "machine": f"{record.machine['cores']} cores: {machine}",
        "load before": ", ".join(f"{name} {number(value)}" for name, value in record.load.items()),
        "disk": ", ".join(f"{name}: {kind}" for name, kind in record.disk.items()),
        "versions": versions,
    }
    parts = [
        "## Measured",
        table(["", ""], facts.items()),
        "To repeat it:",
        "<!-- not run: it takes long, and the checkout would change the clone -->\n" + _block(*commands),
        *(f"![{record.benchmark}: the figures below]({path})" for path in pictures),
        table(["ratio, higher is better", "measured", "target", ""], _ratio_rows(record)),
        *(_figure(title, rows) for title, rows in record.figures.items()),
        *(_list_of(title, rows) for title, rows in record.lists.items()),
    ]
    return "\n\n".join(parts)


def _block(*commands: str) -> str:
    return "\n".join(["```sh", *commands, "```"])


def _ratio_rows(record: Record) -> Iterable[list[str]]:
    missed = record.missed()
    for name, ratio in record.ratios.items():
        yield [name, number(ratio), number(record.targets.get(name)), "below" if name in missed else ""]


def _figure(title: str, rows: Table) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = ([name, *(number(row.get(column)) for column in columns)] for name, row in rows.items())
    return table([title, *columns], cells)


def _list_of(title: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return table(
        [title, *columns], ([name, *(row.get(column, "") for column in columns)] for name, row in rows.items())
    )


def _list(records: Mapping[str, Record], docs: Path) -> str:
    """Return a table of all pages, with each benchmark's targets and date."""
    rows = []
    for page in sorted((docs / "results").glob("*.md")):
        if page.stem in {"index", "benchmarks"}:
            continue
        what = page.read_text("utf-8").partition("\n")[0].partition(": ")[2]
        record = records.get(page.stem)
        if record is None:
            cells = ["", "There is no stored measurement yet."]
        else:
            reached = len(record.targets) - len(record.missed())
            measured = f"{record.date}, {record.form} run, `{record.commit}`"
            cells = [f"{reached} of {len(record.targets)}" if record.targets else "", measured]
        rows.append([f"[{page.stem}]({page.name})", what, *cells])
    return table(["benchmark", "what it measures", "ratios that reach their target", "measured"], rows)


# -- ratios -----------------------------------------------------------------------------------------------------

STEPS = (1, 2, 5)


def draw_ratios(record: Record) -> str:
    """Draw the ratios as dots on a logarithmic scale, each with a tick at its target.

    A ratio that is not positive, such as a negative difference, is shown only as a number.
    """
    ratios = {name: ratio for name, ratio in record.ratios.items() if ratio is not None}
    left = 24 + LETTER * max(len(name.removesuffix(BOUND)) for name in ratios)
    right = max(WIDTH - 140.0, left + 120.0)
    top, line = 24.0, 24.0
    bottom = top + line * len(ratios)
    shown = [value for value in (*ratios.values(), *record.targets.values(), 1.0) if value > 0]
    low, high = math.log10(min(shown)) - 0.1, math.log10(max(shown)) + 0.1

    def place(value: float) -> float:
        return left + (right - left) * (math.log10(value) - low) / (high - low)

    grid = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in STEPS]
    parts = []
    for value in grid:
        if low <= math.log10(value) <= high:
            x = place(value)
            colour, width = (INK, 1.0) if value == 1 else (GREY, 0.6)
            parts.append(f'<path d="M{x:.1f} {top} V{bottom:g}" stroke="{colour}" stroke-width="{width}"/>')
            parts.append(text(round(x, 1), bottom + 18, f"{value:g}", "small mid"))
    missed = record.missed()
    for row, (name, ratio) in enumerate(ratios.items()):
        y = top + line * (row + 0.5)
        target = record.targets.get(name)
        colour = RED if name in missed else BLUE
        parts.append(text(left - 12, y + 4, name.removesuffix(BOUND), "small end"))
        parts.append(text(right + 12, y + 4, number(ratio) + _of(target), "small"))
        if target is not None and target > 0:
            x = round(place(target), 1)
            parts.append(f'<path d="M{x} {y - 8:g} v16" stroke="{QUIET}" stroke-width="2.5"/>')
        if ratio > 0:
            parts.append(f'<circle cx="{place(ratio):.1f}" cy="{y:g}" r="5" fill="{colour}"/>')
    words = "Dot: measured; red: below its target. Tick: target. The scale is logarithmic; right is better."
    parts.append(text(16, bottom + 44, words, "small"))
    return picture(int(right) + 140, int(bottom) + 56, f"{record.benchmark}: ratios and their targets", parts)


def _of(target: float | None) -> str:
    return "" if target is None else f" (at least {number(target)})"


# -- bars -------------------------------------------------------------------------------------------------------

Panel = Mapping[str, float | None]


@dataclass(frozen=True)
class Bars:
    """Panels side by side, each with its own scale and one bar per label.

    `labels` maps each label, in drawing order, to the text shown. The first one is ours.
    """

    title: str
    labels: Mapping[str, str]
    panels: Mapping[str, Panel]
    note: str


def draw_bars(bars: Bars) -> str:
    """Return panels of bars."""
    left = 28 + LETTER * 1.12 * max(map(len, bars.labels.values()))
    each = (WIDTH - left) / len(bars.panels)
    line, top = 24, 44
    parts = []
    for row, (label, words) in enumerate(bars.labels.items()):
        y = top + line * row
        parts.append(text(left - 12, y + 14, words, "end"))
        for place, values in enumerate(bars.panels.values()):
            value = values.get(label)
            if value is None:
                continue
            x = left + each * place
            length = (each - 64) * value / max(most for most in values.values() if most is not None)
            colour = BLUE if row == 0 else GREY
            parts.append(f'<rect x="{x:g}" y="{y}" width="{length:.1f}" height="18" rx="3" fill="{colour}"/>')
            parts.append(text(round(x + length + 6, 1), y + 14, number(value), "small"))
    for place, title in enumerate(bars.panels):
        parts.append(text(left + each * place, 28, title, "title"))
    bottom = top + line * len(bars.labels)
    parts.append(text(16, bottom + 24, bars.note, "small"))
    return picture(WIDTH, bottom + 40, bars.title, parts)


def _column(rows: Table, column: str) -> Panel:
    return {name: row.get(column) for name, row in rows.items()}


RULES = {
    "default": "edgeasync, default policy",
    "synchronous, all": "synchronous, waits for all",
    "synchronous, first 70 %": "synchronous, first 70 %",
    "FedAsync": "FedAsync",
    "FedBuff": "FedBuff",
    "ASGD": "asynchronous SGD",
    "fixed interval": "fixed interval",
}
"""The rules of `policies`, as README's picture names them."""

SCENARIO = "unequal fleet, Dirichlet 0.3, float32"
JUDGED = {
    "full": "medians of 15 seeds; each baseline at its best",
    "short": "medians of 3 seeds; baselines are not tuned",
}


def time_to_target(record: Record) -> Bars:
    """Return time and traffic until 95 % on skewed data.

    A row's name may end with the setting of its rule.
    """
    rows = {name.partition(" (")[0]: row for name, row in record.figures[SCENARIO].items()}
    return Bars(
        "Time and traffic until 95 % accuracy",
        RULES,
        {"seconds to 95 % accuracy": _column(rows, "s"), "megabytes sent": _column(rows, "MB")},
        f"20 simulated unequal devices, skewed data, float32, {JUDGED[record.form]}",
    )
