"""Compare a training step's speed, start and memory with torch on the same machine.

Run as `python -m benchmarks.train_step`. Both sides train the same model from the same weights on
the same batches with SGD, and the losses of their first steps must agree. Speed ratios come from
one process per number of threads, in which blocks of steps alternate. Memory and start come from
fresh processes, one per side in turn.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Form, Results, benchmark, make_parser, show_progress

TORCH = "torch==2.13.0"
SIDES = ("ours", "torch")

SPEED_TARGETS = {
    "mlp": 1.0,
    "lenet": 0.9,
    "residual": 0.9,
    "depthwise": 0.75,
    "transformer": 1.0,
    "gru": None,
    "lstm": None,
}
"""Model -> target of torch's time over ours."""

FRESH_MODELS = ("lenet", "residual")
"""Models whose memory and start are measured."""

MEMORY_TARGET = 3.0


@dataclass(frozen=True)
class Effort:
    """What to measure: block count and length, and fresh processes per side."""

    models: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int
    block_s: float
    processes: int


EFFORTS = {
    Form.FULL: Effort(tuple(SPEED_TARGETS), (1, 2), 31, 0.2, 5),
    Form.SHORT: Effort(tuple(SPEED_TARGETS), (1, 2), 7, 0.06, 1),
    Form.QUICK: Effort(("lenet",), (1,), 1, 0.001, 1),
}


def run_speed(folder: str, names: Sequence[str], threads: int, effort: Effort, results: Results) -> None:
    """Measure the steps of all models with a number of threads."""
    arguments = [folder, str(threads), str(effort.rounds), str(effort.block_s), *names]
    # numpy's own pool may compute the gradient's norm, and must not use more cores than torch.
    environment = {"OPENBLAS_NUM_THREADS": str(threads)}
    found = json.loads(run_module("train_step_speed", arguments, environment))
    for name, medians in found.items():
        ratio = medians["torch"]["step_ms"] / medians["ours"]["step_ms"]
        results.ratio(f"{name}/threads={threads}", ratio, SPEED_TARGETS[name])
        for title, key in (("milliseconds per step", "step_ms"), ("cores busy", "cores")):
            columns = {f"{side}, threads={threads}": medians[side][key] for side in SIDES}
            results.add(title, name, columns)


def run_fresh(folder: str, name: str, effort: Effort, results: Results) -> None:
    """Measure one model's peak memory and start, in processes that do nothing else."""
    starts_s: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks_mb: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(effort.processes):
        show_progress(f"{name}: memory and start, {number + 1} of {effort.processes}")
        for side in SIDES:
            started_s = time.monotonic()
            told = json.loads(run_module(f"train_step_{side}", [f"{folder}/{name}"]))
            starts_s[side].append(told["first_step_s"] - started_s)
            peaks_mb[side].append(told["peak_bytes"] / 1e6)
    peak_mb = {side: statistics.median(values) for side, values in peaks_mb.items()}
    start_s = {side: statistics.median(values) for side, values in starts_s.items()}
    columns = {f"{side}, MB": peak_mb[side] for side in SIDES}
    columns["ours / torch"] = peak_mb["ours"] / peak_mb["torch"]
    results.add("peak memory", name, columns)
    results.add("start to end of first step", name, {f"{side}, s": start_s[side] for side in SIDES})
    results.ratio(f"{name}/memory", peak_mb["torch"] / peak_mb["ours"], MEMORY_TARGET)
    results.ratio(f"{name}/start", start_s["torch"] / start_s["ours"])


def run_module(module: str, arguments: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a benchmark module in a fresh process; return its output, or fail as it does."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})})
    return done.stdout.decode()


PARSER = make_parser("A training step against torch's, and the memory and the start of training.")
PARSER.add_argument("--threads", type=int, nargs="+", help="cores a step may use [default: 1 2]")
PARSER.add_argument("--models", nargs="+", choices=SPEED_TARGETS, help="only these [default: all]")


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested models."""
    if importlib.util.find_spec("torch") is None:
        PARSER.exit(2, f"this benchmark compares with torch, which is not installed: pip install {TORCH}\n")
    effort = EFFORTS[arguments.form]
    models = arguments.models or effort.models
    with tempfile.TemporaryDirectory() as folder:
        show_progress("exporting the models and building their training graphs")
        run_module("train_step_prepare", [folder, *models])
        for threads in arguments.threads or effort.threads:
            run_speed(folder, models, threads, effort, results)
        for name in FRESH_MODELS:
            if name in models:
                run_fresh(folder, name, effort, results)


if __name__ == "__main__":
    main()
