"""Measure what exchanges cost a GPU: joined torch and JAX loops, agents and fleets.

Run as `python -m benchmarks.gpu` on a machine with one NVIDIA GPU, torch and JAX. It needs no
network. Each case has its own process, and if one fails, the others continue. The whole benchmark
ends within `--limit-s`. Without a GPU the exit code is 2.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import surroundings
from benchmarks.gpu_case import CASES
from benchmarks.report import UNFIT, Form, Results, benchmark, make_parser, show_progress
from benchmarks.runner import ended

LIMIT_S = 290.0
CASE_S = 100.0
"""Time limit of one case."""

LEAST_S = 15.0
"""A case is skipped if less time is left."""

JOINED = ("float32", "bfloat16", "float16", "jax", "compile")
"""Cases that must meet all bounds."""

OVER_ALONE_MIN = 0.95
HELD_UP_MAX = 5.0
POINTS_MAX = 1.0
COPIES_MAX = 2.0

STEP_MS = 10.0
STEP_OFF_MAX = 10.0
"""How far a step without a hub may be from `STEP_MS`, in percent.

The other bounds assume steps of that time.
"""

Figures = Mapping[str, float]


def run_case(command: Sequence[str], limit_s: float) -> Figures:
    """Return the figures that a case prints.

    Raises `RuntimeError` with the case's output if it prints none in time. The process leads a new
    session, so that all its children can be killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=surroundings.ROOT, stdout=output, stderr=said, text=True, start_new_session=True
        )
        with ended(process):
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"none after {limit_s:.0f} s"
        output.seek(0)
        said.seek(0)
        lines, words = output.read().splitlines(), said.read()
    if code != 0 or not lines:
        raise RuntimeError(f"exit code {code}: {words.strip()[-2000:]}")
    figures: Figures = json.loads(lines[-1])
    return figures


def measure(
    names: Sequence[str], commands: Mapping[str, Sequence[str]], limit_s: float, partial: Path | None = None
) -> dict[str, Figures | str]:
    """Return the figures of each case, or why it has none; write them to `partial` as they come."""
    until_s = time.monotonic() + limit_s
    found: dict[str, Figures | str] = {}
    for number, name in enumerate(names, start=1):
        left_s = until_s - time.monotonic()
        show_progress(f"[{number} of {len(names)}] {name}; {left_s:.0f} s left")
        begun_s = time.monotonic()
        found[name] = "there was no time left for it"
        if left_s > LEAST_S:
            try:
                found[name] = run_case(commands[name], min(left_s, CASE_S))
            except (RuntimeError, ValueError) as error:
                found[name] = str(error)
        show_progress(f"{name}, {time.monotonic() - begun_s:.1f} s: {json.dumps(found[name])}")
        if partial is not None:
            partial.write_text(json.dumps(found, indent=1) + "\n")
    return found


def judge(found: Mapping[str, Figures | str], results: Results) -> None:
    """Add the figures to the results, and compare those of joined loops with the bounds.

    A case without figures misses its bounds.
    """
    nothing: dict[str, float] = {}
    for name, figures in found.items():
        measured = nothing if isinstance(figures, str) else figures
        for title, columns in TABLES.items():
            if shown := {column: measured[column] for column in columns if column in measured}:
                results.add(title, name, shown)
        if isinstance(figures, str):
            results.add("cases that failed", name, {"failed": 1.0})
        if name not in JOINED:
            continue
        infinite = float("inf")
        speed = f"{name}: steps/s joined over alone"
        results.ratio(speed, measured.get("joined over alone", 0.0), OVER_ALONE_MIN)
        lost = measured.get("accuracy alone %", infinite) - measured.get("accuracy joined %", 0.0)
        results.bound(f"{name}: held up, % of the time", _least(measured.get("held up %", infinite)), HELD_UP_MAX)
        off = 100 * abs(measured.get("ms a step alone", infinite) / STEP_MS - 1)
        results.bound(f"{name}: % that a step alone is off its 10 ms", _least(off), STEP_OFF_MAX)
        results.bound(f"{name}: points of accuracy lost", _least(lost), POINTS_MAX)
        results.bound(f"{name}: copies an exchange", measured.get("copies an exchange", infinite), COPIES_MAX)


def _least(measured: float) -> float:
    """Clamp a figure that noise may make negative, so that its ratio to a bound is valid."""
    return max(measured, 0.01)


TABLES = {
    "speed": (
        *("steps/s alone", "steps/s joined", "held up %", "ms held up an exchange"),
        *("ms a step alone", "steps an exchange", "exchanges"),
    ),
    "copies and memory": (
        *("copies an exchange", "MB copied an exchange", "MB on the GPU beside the module's"),
        *("DtoH seen an exchange", "HtoD seen an exchange", "waits seen an exchange"),
    ),
    "accuracy": ("accuracy alone %", "accuracy joined %"),
    "fleet": ("updates", "updates/s", "s until the killed one is back"),
}


def commands_of(names: Sequence[str], device: str, form: Form) -> dict[str, list[str]]:
    """Return the command of each case."""
    case = [sys.executable, "-m", "benchmarks.gpu_case"]
    return {name: [*case, name, "--device", device, "--form", form] for name in names}


NAMES = list(CASES)
PARSER = make_parser("What exchanges cost a GPU.")
PARSER.add_argument("--case", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
PARSER.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of the whole benchmark")
PARSER.add_argument("--partial", type=Path, help="a file for the figures so far, written after each case")
PARSER.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # "cpu" stands for a GPU in tests


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure all cases, and compare them with their bounds."""
    if arguments.device != "cpu" and "gpu" not in surroundings.machine():
        show_progress("this benchmark needs an NVIDIA GPU, but this machine's driver lists none")
        sys.exit(UNFIT)
    commands = commands_of(arguments.case, arguments.device, arguments.form)
    found: Any = measure(arguments.case, commands, arguments.limit_s, arguments.partial)
    judge(found, results)


if __name__ == "__main__":
    main()
