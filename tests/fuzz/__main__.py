"""Long runs: `python -m tests.fuzz --target NAME --cases N --seed S`. Findings are kept; exit code 1 then."""

import argparse
import resource
import sys
from pathlib import Path

import psutil

from tests.fuzz.running import run
from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 1 << 30
"""How much more address space a target may take than when it begins."""


def main():
    """Run one target, or each in turn."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--cases", type=int, default=10_000, help="how many, of each target")
    parser.add_argument("--seconds", type=float, help="the most time for each target")
    parser.add_argument("--seed", default="0", help="what all cases are drawn from")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, default=Path("build/findings"), help="folder for what is found")
    options = parser.parse_args()
    failed = False
    for name in TARGETS if options.target == "all" else [options.target]:
        failed |= fuzz(name, options)
    return int(failed)


def fuzz(name, options):
    """Run a target, and say what came of it; return whether something was found."""
    with TARGETS[name]() as target:
        limit_bytes = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
        try:
            result = run(
                target, name, options.seed, options.cases, first=options.first, seconds=options.seconds, timed=True
            )
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = len(result.findings)
    print(
        f"{name}, seed {options.seed}: {result.cases} cases, {result.taken} taken, slowest "
        f"{1e3 * result.slowest_s:.0f} ms, {found} findings",
        flush=True,
    )
    for finding in result.findings:
        options.keep.mkdir(parents=True, exist_ok=True)
        path = options.keep / f"{name}.{options.seed}-{finding.number}"
        path.write_bytes(finding.content)
        again = f"--target {name} --seed {options.seed} --first {finding.number} --cases 1"
        print(f"  {path}: {again}\n{finding.what}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
