"""Code that all benchmarks share: arguments, results and their output.

A ratio compares us with something else that alternated with us in one run on one machine, or
divides a bound by the figure that must not exceed it. Higher is better. Absolute figures depend on
the machine, so they are shown with its description.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.surroundings import commit, machine, versions

MEANINGLESS = ": a smoke run on tiny sizes, whose figures mean nothing"

UNFIT = 2
"""Exit code of a benchmark that cannot run on this machine, for example without a GPU."""

INTERRUPTED = 130
"""A shell's exit code for a command that Ctrl-C ended."""

CONDITIONAL = ("gpu", "page", "published_models")
"""Benchmarks that may exit with `UNFIT`, because they need hardware or packages of their own."""

BOUND = ": bound over measured"
"""Suffix in the name of a ratio that divides a bound by the figure."""

Table = dict[str, dict[str, float]]
"""Row name -> column name -> number; rows may lack columns."""

Words = dict[str, dict[str, str]]
"""Row name -> column name -> words; rows may lack columns."""


@dataclass
class Results:
    """Results of a benchmark.

    `figures` are tables of numbers by title, `lists` are tables of words, and `targets` are minimum
    ratios.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Table] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    lists: dict[str, Words] = field(default_factory=dict)

    def add(self, title: str, row: str, columns: Mapping[str, float], digits: int = 3) -> None:
        """Add rounded columns to a row of figures; create table and row if missing."""
        rounded = {name: round(float(value), digits) for name, value in columns.items()}
        self.figures.setdefault(title, {}).setdefault(row, {}).update(rounded)

    def tell(self, title: str, row: str, columns: Mapping[str, str]) -> None:
        """Add words to a row of a list; create list and row if missing."""
        self.lists.setdefault(title, {}).setdefault(row, {}).update(columns)

    def ratio(self, name: str, value: float, target: float | None = None) -> None:
        """Add a ratio and, optionally, its target."""
        self.ratios[name] = round(value, 4)
        if target is not None:
            self.targets[name] = round(target, 4)

    def bound(self, name: str, measured: float, bound: float) -> None:
        """Add the ratio `bound / measured`; at 1 or more, the bound holds."""
        self.ratio(name + BOUND, bound / max(measured, 1e-9), 1.0)


class Form(StrEnum):
    """How thoroughly a benchmark measures."""

    FULL = "full"
    SHORT = "short"
    QUICK = "quick"


def make_parser(description: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all benchmarks: `form`, and `part` if there are parts."""
    parser = argparse.ArgumentParser(description=description)
    if names := list(parts):
        parser.add_argument("--part", nargs="+", choices=names, default=names, help="only these [default: all]")
    parser.add_argument("--json", action="store_true", help="print one JSON object: machine, ratios, figures")
    add_forms(parser, Form.FULL)
    return parser


def benchmark(
    parser: argparse.ArgumentParser | str, parts: Iterable[str] = ()
) -> Callable[[Callable[[argparse.Namespace, Results], None]], Callable[[], None]]:
    """Turn a function that measures into the `main` of a benchmark.

    `main` parses the arguments, measures, prints the results and enforces the targets. `parser` may
    also be a description.
    """
    parser = make_parser(parser, parts) if isinstance(parser, str) else parser

    def decorate(measure: Callable[[argparse.Namespace, Results], None]) -> Callable[[], None]:
        def main() -> None:
            arguments, results = parser.parse_args(), Results()
            try:
                measure(arguments, results)
            except KeyboardInterrupt:
                sys.exit(INTERRUPTED)
            show_results(results, arguments)
            enforce_targets(results, arguments)

        return main

    return decorate


def add_forms(parser: argparse.ArgumentParser, default: Form | str) -> None:
    """Add the flags that set `form`."""
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--short",
        dest="form",
        action="store_const",
        const=Form.SHORT,
        default=default,
        help="fewer and shorter rounds: rougher, in minutes",
    )
    forms.add_argument(
        "--quick",
        dest="form",
        action="store_const",
        const=Form.QUICK,
        default=default,
        help="run once on tiny sizes, in seconds: it shows that the benchmark works, and its figures mean nothing",
    )


def show_progress(sentence: str) -> None:
    """Print progress on standard error, because standard output is only for results."""
    print(sentence, file=sys.stderr, flush=True)


def show_results(results: Results, arguments: argparse.Namespace) -> None:
    """Print the results as tables or, with `--json`, as one JSON object."""
    if arguments.json:
        found = {
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "form": arguments.form,
            "ratios": results.ratios,
            "targets": results.targets,
            "figures": results.figures,
            "lists": results.lists,
        }
        print(json.dumps(found, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in {**machine(), **versions()}.items()))
    print(f"commit {commit()}, {arguments.form} run" + MEANINGLESS * (arguments.form == Form.QUICK))
    for title, table in results.figures.items():
        columns = list(dict.fromkeys(column for row in table.values() for column in row))
        rows = [[name, *(number(row.get(column)) for column in columns)] for name, row in table.items()]
        _print_table([title, *columns], rows)
    for title, words in results.lists.items():
        columns = list(dict.fromkeys(column for row in words.values() for column in row))
        rows = [[name, *(row.get(column, "") for column in columns)] for name, row in words.items()]
        _print_table([title, *columns], rows)
    targets = results.targets
    rows = [[name, f"{ratio:.2f}", number(targets.get(name))] for name, ratio in results.ratios.items()]
    _print_table(["ratio, higher is better", "measured", "target"], rows)


def enforce_targets(results: Results, arguments: argparse.Namespace) -> None:
    """Exit with code 1 and print one line per ratio that misses its target.

    A quick run enforces no targets.
    """
    missed = [name for name, target in results.targets.items() if not results.ratios[name] >= target]
    for name in missed:
        show_progress(f"{name}: {results.ratios[name]:.2f} is below {results.targets[name]:g}")
    if missed and arguments.form != Form.QUICK:
        sys.exit(1)


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for row in [head, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


def number(value: float | None) -> str:
    """Format a number with three significant digits, or as an integer.

    Return an empty string for `None`.
    """
    if value is None:
        return ""
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
