"""What every benchmark shares: its arguments, the description of the machine, and how results are shown.

A ratio says how we compare with something measured in the same run, on the same machine, in turns; higher is
better. Absolute figures belong to the machine they were taken on and are shown beside its description.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import zmq

Table = dict[str, dict[str, float]]
"""Row name -> column name -> number; rows may lack columns."""


@dataclass
class Results:
    """What a benchmark found: `figures` are tables by title, `targets` what some ratios should reach."""

    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Table] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)

    def add(self, title: str, row: str, columns: Mapping[str, float]) -> None:
        """Add columns to a row of a table of figures; both are made where they are missing."""
        self.figures.setdefault(title, {}).setdefault(row, {}).update(columns)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object: machine, ratios, figures")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: rougher, within a minute")
    return parser


def machine() -> dict[str, str | int]:
    """Describe what the figures were taken on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "numpy": np.__version__,
        "onnxruntime": version("onnxruntime"),
        "torch": _version_of("torch"),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show_progress(sentence: str) -> None:
    """Tell whoever waits what is being measured; standard output stays clean for the results."""
    print(sentence, file=sys.stderr, flush=True)


def show_results(results: Results, *, as_json: bool) -> None:
    """Print the results: tables for people, or exactly one JSON object."""
    if as_json:
        found = {"machine": machine(), "ratios": results.ratios, "figures": results.figures}
        print(json.dumps(found, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for title, table in results.figures.items():
        columns = list(dict.fromkeys(column for row in table.values() for column in row))
        rows = [[name, *(_number(row.get(column)) for column in columns)] for name, row in table.items()]
        _print_table([title, *columns], rows)
    targets = results.targets
    rows = [[name, f"{ratio:.2f}", _number(targets.get(name))] for name, ratio in results.ratios.items()]
    _print_table(["ratio, higher is better", "measured", "target"], rows)


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for row in [head, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


def _number(value: float | None) -> str:
    """Write a number with three digits that mean something."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
