"""Run one GPU case in its own process: `gpu_case NAME --device cuda`."""

import argparse
import json
from importlib import import_module

from benchmarks.gpu_devices import Case
from benchmarks.report import Form

CASES = {
    "jax": "gpu_jax:joined",
    "bfloat16": "gpu_torch:joined",
    "float16": "gpu_torch:joined",
    "float32": "gpu_torch:joined",
    "compile": "gpu_torch:joined",
    "agent": "gpu_torch:agent",
    "fleet": "gpu_fleet:fleet",
    "tutorial": "gpu_fleet:tutorial",
    "waiting": "gpu_torch:waiting",
    "profiled": "gpu_torch:profiled",
}
"""Case name -> module and function that measure it, so that only these are imported."""


def main() -> None:
    """Measure the case and print its figures as JSON."""
    parser = argparse.ArgumentParser(description="Measure one case of the GPU benchmark.")
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--form", type=Form, default=Form.FULL)
    given = parser.parse_args()
    module, _, function = CASES[given.name].partition(":")
    measure = getattr(import_module(f"benchmarks.{module}"), function)
    print(json.dumps(measure(Case(given.device, given.form, given.name))))


if __name__ == "__main__":
    main()
