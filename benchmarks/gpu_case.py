"""One case of the GPU benchmark, in a process of its own: `python -m benchmarks.gpu_case NAME --device cuda`."""

import argparse
import json
from collections.abc import Callable

from benchmarks.gpu_devices import Case, Figures
from benchmarks.report import Form


def cases() -> dict[str, Callable[[Case], Figures]]:
    """Return how each case is measured; what a case does not need is not imported."""

    def joined(kind: str) -> Callable[[Case], Figures]:
        def measure(case: Case) -> Figures:
            from benchmarks import gpu_torch  # noqa: PLC0415

            return gpu_torch.joined(case, kind)

        return measure

    def waiting(case: Case) -> Figures:
        from benchmarks import gpu_torch  # noqa: PLC0415

        return gpu_torch.waiting(case)

    def profiled(case: Case) -> Figures:
        from benchmarks import gpu_torch  # noqa: PLC0415

        return gpu_torch.profiled(case)

    def agent(case: Case) -> Figures:
        from benchmarks import gpu_torch  # noqa: PLC0415

        return gpu_torch.agent(case)

    def jax(case: Case) -> Figures:
        from benchmarks import gpu_jax  # noqa: PLC0415

        return gpu_jax.joined(case)

    def tutorial(case: Case) -> Figures:
        from benchmarks import gpu_fleet  # noqa: PLC0415

        return gpu_fleet.tutorial(case)

    def fleet(case: Case) -> Figures:
        from benchmarks import gpu_fleet  # noqa: PLC0415

        return gpu_fleet.fleet(case)

    return {
        "jax": jax,
        "bfloat16": joined("bfloat16"),
        "float16": joined("float16"),
        "float32": joined("float32"),
        "compile": joined("compile"),
        "agent": agent,
        "fleet": fleet,
        "tutorial": tutorial,
        "waiting": waiting,
        "profiled": profiled,
    }


def main() -> None:
    """Measure the case, and print its figures as JSON."""
    parser = argparse.ArgumentParser(description="Measure one case of the GPU benchmark.")
    parser.add_argument("name", choices=cases())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--form", type=Form, default=Form.FULL)
    given = parser.parse_args()
    print(json.dumps(cases()[given.name](Case(given.device, given.form))))


if __name__ == "__main__":
    main()
