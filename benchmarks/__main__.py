"""Run every benchmark in turn: `python -m benchmarks --quick` shows in a minute that all of them work.

A benchmark is a module here with a `main`. Its parts, some of which are programs too, begin with its name:
`train_step_speed` is a part of `train_step`.
"""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Form, make_parser

FOLDER = Path(__file__).parent


def find_benchmarks(folder: Path = FOLDER) -> list[str]:
    """Return the names of all benchmarks in a folder."""
    modules = [path for path in folder.glob("*.py") if path.stem != "__main__"]
    programs = [path.stem for path in modules if "\ndef main(" in path.read_text(encoding="utf-8")]
    return sorted(name for name in programs if not any(name.startswith(f"{whole}_") for whole in programs))


def run_benchmark(name: str, flags: list[str], *, quietly: bool) -> bool:
    """Run a benchmark and print how it went, with its output if it failed; return whether it did well."""
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags],
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE if quietly else None,
        stderr=subprocess.STDOUT if quietly else None,
        text=True,
        check=False,
    )
    if done.returncode and quietly:
        print(done.stdout)
    print(f"{name:20} {time.perf_counter() - started_s:6.1f} s  exit code {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> None:
    """Run all benchmarks; end with 1 if any of them failed."""
    arguments = make_parser("Run every benchmark in turn.").parse_args()
    flags = [f"--{arguments.form}"] * (arguments.form != Form.FULL) + ["--json"] * arguments.json
    quietly = arguments.form == Form.QUICK
    good = [run_benchmark(name, flags, quietly=quietly) for name in find_benchmarks()]
    print(f"{len(good)} benchmarks, {good.count(False)} failed")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
