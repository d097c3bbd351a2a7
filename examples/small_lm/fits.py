"""Show on which boards a training graph fits, computed from the prediction of `edgeasync model inspect`.

Build a graph with `edgeasync model build lm.onnx --lora '8:*.[qv]_proj' --base int4 --recompute --out
int4.onnx`, and run `python examples/small_lm/fits.py int4.onnx`. Nothing is measured on the boards.
"""

import argparse
import json
import subprocess
import sys

BOARDS = {
    "Zero 2 W (0.5 GB)": 0.5e9,
    "Pi 4 (1 GB)": 1e9,
    "Pi 4 or 5 (2 GB)": 2e9,
    "Pi 5 (4 GB)": 4e9,
    "Orin Nano (8 GB)": 8e9,
}
"""The memory of some boards, in bytes."""

SHARE = 0.5
"""The part of a board's memory that training may use. The rest is for the system and other programs."""


def predicted_bytes(file: str, batch_size: int) -> int:
    """Return the memory that a process needs to train with this number of examples per step."""
    command = [sys.executable, "-m", "edgeasync", "model", "inspect", file, "--json"]
    done = subprocess.run(  # noqa: S603
        [*command, "--batch-size", str(batch_size)], stdout=subprocess.PIPE, check=True
    )
    training = json.loads(done.stdout)["training"]
    if training["step"] is None:
        sys.exit(f"{file}: {training['step_problem']}")
    return int(training["step"]["memory_bytes"])


def main() -> None:
    """Print a table in Markdown, with a row for each file and batch size."""
    parser = argparse.ArgumentParser(description="Show on which boards a training graph fits.")
    parser.add_argument("files", nargs="+", help="training graphs")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    print(f"| graph | examples per step | memory, MB | {' | '.join(BOARDS)} |")
    print(f"|---|---|---|{'---|' * len(BOARDS)}")
    for file in arguments.files:
        for batch_size in arguments.batch_size:
            needed = predicted_bytes(file, batch_size)
            fits = ["yes" if needed <= SHARE * nbytes else "no" for nbytes in BOARDS.values()]
            print(f"| `{file}` | {batch_size} | {needed / 1e6:.0f} | {' | '.join(fits)} |", flush=True)


if __name__ == "__main__":
    main()
