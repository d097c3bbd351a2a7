"""The files that both sides of the training benchmark read. Imports only numpy.

A model's folder contains a training graph, the layout and initial values of its parameters, and the
data. A side needs nothing else, so its process imports as little as a device does.
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
"""A whole number of batches, so that every step has equally many examples."""

BATCH = 32
LEARNING_RATE = 0.1
DATA_SEED = 1

FRESH_STEPS = 20
"""Steps in which a fresh process reaches its peak memory."""


def load_data(folder: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return examples and their classes."""
    return np.load(folder / X_FILE), np.load(folder / Y_FILE)


def tell_start_and_peak(step: Callable[[], float]) -> None:
    """Run some steps; print the end time of the first, and the peak memory."""
    step()
    first_step_s = time.monotonic()
    for _ in range(FRESH_STEPS - 1):
        step()
    print(json.dumps({"first_step_s": first_step_s, "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Return this program's peak resident memory since its start.

    Unlike getrusage's figure, it does not include the parent's.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(kilobytes)
