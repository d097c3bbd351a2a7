"""Time the steps of both sides in turns.

Run as `python -m benchmarks.train_step_speed FOLDER THREADS ROUNDS BLOCK_S MODEL...`. Each number
of threads needs its own process, because the pools of torch and numpy are created only once. Blocks
of steps alternate: ours, torch, ours, torch. Both pools wait for work for a moment before they
sleep. So before every block there are a pause and an uncounted step, which loads the side's data
into the caches again.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import train_step_ours, train_step_torch
from benchmarks.report import show_progress

COMPARED_STEPS = 8
TOLERANCE = 1e-4
WARM_STEPS = 3
PAUSE_S = 0.01
"""How long to wait until no thread of the other side spins.

GNU's OpenMP pool spins for about a millisecond.
"""

Step = Callable[[], float]


@dataclass(frozen=True)
class Timed:
    """A block's mean step time, and how many cores the process used."""

    step_ms: float
    cores: float


def check_losses(name: str, ours: Step, theirs: Step) -> None:
    """Take the first steps of both sides; raises `RuntimeError` if their losses differ."""
    for number in range(1, COMPARED_STEPS + 1):
        our_loss, their_loss = ours(), theirs()
        # Written so that a NaN fails, too.
        if not abs(our_loss - their_loss) <= TOLERANCE:
            raise RuntimeError(
                f"{name}: the loss of step {number} is {our_loss:.6f} with us and {their_loss:.6f} with torch: "
                "they do not train the same model, and comparing their speed would mean nothing"
            )


def time_block(step: Step, steps: int) -> Timed:
    """Run a block of steps of one side."""
    time.sleep(PAUSE_S)
    step()
    cpu_s, started_s = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    elapsed_s = time.perf_counter() - started_s
    return Timed(1e3 * elapsed_s / steps, (time.process_time() - cpu_s) / elapsed_s)


def measure(folder: Path, threads: int, rounds: int, block_s: float) -> dict[str, Timed]:
    """Return each side's medians over the blocks."""
    sides: dict[str, Step] = {
        "ours": train_step_ours.make_step(folder, threads),
        "torch": train_step_torch.make_step(folder, threads),
    }
    check_losses(folder.name, sides["ours"], sides["torch"])
    slower_ms = max(time_block(step, WARM_STEPS).step_ms for step in sides.values())
    steps = max(3, math.ceil(1e3 * block_s / slower_ms))
    blocks: dict[str, list[Timed]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, step in sides.items():
            blocks[side].append(time_block(step, steps))
    return {
        side: Timed(
            statistics.median(block.step_ms for block in timed), statistics.median(block.cores for block in timed)
        )
        for side, timed in blocks.items()
    }


def main() -> None:
    """Measure all given models; print one JSON object."""
    folder, threads, rounds, block_s, *names = sys.argv[1:]
    found = {}
    for name in names:
        show_progress(f"{name}: speed, threads = {threads}")
        medians = measure(Path(folder) / name, int(threads), int(rounds), float(block_s))
        found[name] = {side: asdict(timed) for side, timed in medians.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
