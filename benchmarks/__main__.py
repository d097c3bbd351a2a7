"""Run benchmarks, and generate pages and pictures from their results.

`python -m benchmarks --quick` checks in a minute that all benchmarks work. `python -m benchmarks
run --all` measures and writes benchmarks/results. `python -m benchmarks plot` writes docs/results
from these files.

A benchmark is a module in this folder with a `main`. The names of its other modules begin with its
name: `train_step_speed` belongs to `train_step`. Some of them are programs, too.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plot import plot
from benchmarks.report import CONDITIONAL, UNFIT, Form, add_forms, make_parser
from benchmarks.runner import run_all

FOLDER = Path(__file__).parent


def find_benchmarks(folder: Path = FOLDER) -> list[str]:
    """Return the names of all benchmarks in a folder."""
    modules = [path for path in folder.glob("*.py") if path.stem != "__main__"]
    programs = [path.stem for path in modules if "\ndef main(" in path.read_text(encoding="utf-8")]
    return sorted(name for name in programs if not any(name.startswith(f"{whole}_") for whole in programs))


def run_benchmark(name: str, flags: list[str], *, quietly: bool) -> bool:
    """Run a benchmark and print its duration and exit code; return whether it succeeded.

    If `quietly`, print its output only if it failed.
    """
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags],
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE if quietly else None,
        stderr=subprocess.STDOUT if quietly else None,
        text=True,
        check=False,
    )
    unfit = name in CONDITIONAL and done.returncode == UNFIT
    if done.returncode and quietly:
        print(done.stdout)
    print(f"{name:20} {time.perf_counter() - started_s:6.1f} s  exit code {done.returncode}", flush=True)
    return done.returncode == 0 or unfit


def show_all(arguments: argparse.Namespace) -> int:
    """Run all benchmarks and print their results; return 1 if any of them failed."""
    flags = [f"--{arguments.form}"] * (arguments.form != Form.FULL) + ["--json"] * arguments.json
    quietly = arguments.form == Form.QUICK
    good = [run_benchmark(name, flags, quietly=quietly) for name in find_benchmarks()]
    print(f"{len(good)} benchmarks, {good.count(False)} failed")
    return int(not all(good))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; refuse a quick run that would store results."""
    parser = make_parser("Run every benchmark and print its results, or run a command.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="measure, and write benchmarks/results/NAME.json")
    which = run.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", dest="only", action="store_const", const=find_benchmarks(), help="every benchmark")
    which.add_argument("--only", nargs="+", choices=find_benchmarks(), metavar="NAME", help="these benchmarks")
    add_forms(run, argparse.SUPPRESS)
    commands.add_parser("plot", help="write the pages and pictures of docs/results from benchmarks/results")
    found = parser.parse_args(arguments)
    if found.command == "run" and found.form == Form.QUICK:
        run.error("the figures of a quick run mean nothing: measure in full, or with --short")
    return found


def main() -> None:
    """Run the command of the arguments; exit with code 1 if a benchmark failed."""
    arguments = parse()
    if arguments.command == "run":
        for number in (signal.SIGINT, signal.SIGTERM):  # also SIGTERM, and both even if a script ignores them
            signal.signal(number, signal.default_int_handler)
        sys.exit(run_all(arguments.only, arguments.form))
    if arguments.command == "plot":
        sys.exit(plot())
    sys.exit(show_all(arguments))


if __name__ == "__main__":
    main()
