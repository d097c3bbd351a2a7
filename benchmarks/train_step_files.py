"""The files that both sides of the training benchmark read. This module imports only numpy.

A model's folder holds a training graph, the layout of its parameters and their first values, and the data. A side
needs nothing else, so that its process imports as little as a device does.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

FORWARD_FILE, GRAPH_FILE = "forward.onnx", "training.onnx"
SPEC_FILE, INITIAL_FILE = "spec.json", "initial.npy"
X_FILE, Y_FILE = "x.npy", "y.npy"

EXAMPLES = 1024
"""A whole number of batches, so that every step has as many examples."""

BATCH = 32
LEARNING_RATE = 0.1
DATA_SEED = 1

FRESH_STEPS = 20
"""How many steps a fresh process takes to reach its peak of memory."""


def load_data(folder: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return examples and their classes."""
    return np.load(folder / X_FILE), np.load(folder / Y_FILE)


def tell_start_and_peak(step: Callable[[], float]) -> None:
    """Take some steps; print when the first was over, on the machine's clock, and the peak of memory."""
    step()
    first_step_s = time.monotonic()
    for _ in range(FRESH_STEPS - 1):
        step()
    print(json.dumps({"first_step_s": first_step_s, "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Return the most that this program has had resident, from its start: unlike getrusage's, not its parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(kilobytes)
