"""Train models that people publish: 40 drawn from five libraries and a wheel, gradients against torch in float64.

Run as `python -m benchmarks.published_models`. The libraries run in an environment of their own,
which `--install-peers` creates. The draw shuffles the families of each library by a seed. Of up to
six models of a family, it takes the one with the fewest parameters. Models that cannot be made,
are too large or that their own library cannot export are listed, and the next family replaces them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.published_models_limits import DISTANCE_MAX, ERROR_RATIO_MAX, WRONG_RATIO_MAX
from benchmarks.report import UNFIT, Form, Results, benchmark, make_parser, show_progress
from benchmarks.surroundings import ROOT

SEED = 53
QUOTAS = {"torchvision": 8, "timm": 12, "transformers": 8, "MONAI": 5, "Keras": 4, "openwakeword": 3}
"""How many models of each library are drawn."""

PACKAGES = (
    "einops==0.8.2", "keras==3.15.1", "monai==1.6.1", "onnxscript==0.7.2", "sentencepiece==0.2.3", "timm==1.0.31",
    "torch==2.13.0", "torchvision==0.28.0", "transformers==5.24.0",
)  # fmt: skip
WHEEL = "openwakeword==0.4.0"
"""This wheel is installed without its dependencies, because only its files are read."""

SPARES = 2
"""For each model, this many are drawn, because some cannot be exported."""

PATIENCE_S = 1200.0
"""How long the check of a model may take. It also has a limit on processor time, which is shorter."""

TRAIN_MIN = 37 / 40
"""The least share of the drawn models that train with at most one flag."""

Outcome = dict[str, Any]


def _ask(python: Path, command: str, library: str, seed: int, what: int | str) -> Any:
    """Run the child program; return the object that it prints last, or what happened instead."""
    program = [str(python), "-m", "benchmarks.published_models_check", command, library, str(seed), str(what)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            program, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "reason": f"not finished after {PATIENCE_S:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = [line for line in done.stderr.splitlines() if line.strip()]
        return {"outcome": "failed", "reason": f"exit code {done.returncode}: {(last or [''])[-1]}"}


def judge(told: Outcome) -> Outcome:
    """Decide whether a model trains, from what its process told."""
    if told["outcome"] != "built":
        return told
    exact = told["error ratio"] <= ERROR_RATIO_MAX and told["worst ratio"] <= WRONG_RATIO_MAX
    if not (exact and told["distance"] <= DISTANCE_MAX) or told["unknown"] or told["missing"]:
        return told | {"outcome": "WRONG", "reason": _wrong(told)}
    many = len(told["flags"]) > 1
    return told | {"outcome": "needs more flags" if many else "trains"}


def _wrong(told: Outcome) -> str:
    if told["unknown"]:
        return f"trains what is no parameter: {', '.join(told['unknown'])}"
    if told["missing"]:
        return f"does not train {', '.join(told['missing'])}"
    if told["distance"] > DISTANCE_MAX:
        return f"its values differ from those in float64 by a share of {told['distance']:.1e}"
    return (
        f"{told['error ratio']:.1f} times torch's error ({told['error']:.1e}, {told['torch error']:.1e}); "
        f"{told['worst']}: {told['worst ratio']:.1f} times ({told['worst error']:.1e}, "
        f"{told['worst torch error']:.1e})"
    )


def measure(
    library: str, count: int, python: Path, seed: int, pool: ThreadPoolExecutor
) -> tuple[list[Outcome], dict[str, str]]:
    """Check `count` models of a library; replace those that it cannot export.

    Returns the outcomes, and why models were left out.
    """
    drawn, found = _ask(python, "draw", library, seed, SPARES * count), list[Outcome]()
    if "models" not in drawn:
        raise RuntimeError(f"the models of {library} cannot be drawn: {drawn['reason']}")
    left_out = {f"{library} {name}": _line(reason) for name, reason in drawn["left out"].items()}
    models = iter(drawn["models"])
    while chosen := list(islice(models, count - len(found))):
        for outcome in pool.map(lambda name: _check(python, library, name, seed), chosen):
            if outcome["outcome"] == "not exported":
                left_out[f"{library} {outcome['model']}"] = f"not exported: {_line(outcome['reason'])}"
            else:
                found.append(outcome)
    return found, left_out


def _check(python: Path, library: str, name: str, seed: int) -> Outcome:
    told = _ask(python, "check", library, seed, name)
    outcome = judge({"library": library, "model": name, "flags": [], **told})
    show_progress(f"{library} {name}: {outcome['outcome']} {_line(outcome.get('reason', ''))}")
    return outcome


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def report(outcomes: Sequence[Outcome], left_out: Mapping[str, str], results: Results) -> None:
    """Add what happened to every model."""
    for outcome in outcomes:
        row = f"{outcome['library']} {outcome['model']}"
        words = {"outcome": outcome["outcome"], "flag": ", ".join(outcome["flags"])}
        results.tell("model", row, words | {"reason": _line(outcome.get("reason", ""))})
        if "error" in outcome:
            columns = {
                "million parameters": outcome["parameters"] / 1e6,
                "nodes": outcome["nodes"],
                "seconds to build": outcome["build s"],
                "seconds to a session": outcome["session s"],
                "step / torch's": outcome["step s"] / outcome["torch step s"],
                "error / torch's": outcome["plain ratio"],
                "on the same sides": outcome["error ratio"],
                "error, millionths": 1e6 * outcome["error"],
                "torch's": 1e6 * outcome["torch error"],
            }
            results.add("gradients", row, columns)
    for row, reason in left_out.items():
        results.tell("not drawn", row, {"reason": reason})
    count = {name: [each["outcome"] for each in outcomes].count(name) for name in ("trains", "WRONG")}
    results.ratio("share that trains with at most one flag", count["trains"] / len(outcomes), TRAIN_MIN)
    results.ratio("share whose gradients are right or refused", 1 - count["WRONG"] / len(outcomes), 1.0)
    near = [each for each in outcomes if each.get("plain ratio", math.inf) <= ERROR_RATIO_MAX]
    results.ratio("share within twice torch's error, on any side", len(near) / len(outcomes), TRAIN_MIN)


def install_peers(python: Path) -> None:
    """Create the environment of the libraries."""
    show_progress(f"installing {', '.join(PACKAGES)}")
    folder = python.parents[1]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[hub]", *PACKAGES], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", WHEEL], check=True)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("Train published models, and compare all gradients with torch in float64.")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the draw [default: {SEED}]")
    parser.add_argument(
        "--library", nargs="+", choices=QUOTAS, default=[*QUOTAS], help="only these [default: all]"
    )
    parser.add_argument("--python", type=Path, default=ROOT / ".peers/models/bin/python", help=argparse.SUPPRESS)
    parser.add_argument("--install-peers", action="store_true", help="first install the libraries into .peers")
    return parser


@benchmark(_parser())
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Check the drawn models."""
    python: Path = arguments.python
    if arguments.install_peers:
        install_peers(python)
    if not python.exists():
        show_progress("the libraries are not installed; add --install-peers")
        sys.exit(UNFIT)
    show_progress(f"seed {arguments.seed}")
    outcomes, left_out = list[Outcome](), dict[str, str]()
    quick = arguments.form == Form.QUICK
    few = {"openwakeword": 1} if quick else {name: QUOTAS[name] for name in arguments.library}
    with ThreadPoolExecutor(2) as pool:
        for library, count in few.items():
            found, reasons = measure(library, count, python, arguments.seed, pool)
            outcomes += found
            left_out |= reasons
    report(outcomes, left_out, results)


if __name__ == "__main__":
    main()
