"""Takes a few training steps in a new process, to measure their time and memory on this machine.

The process imports only what a device imports, so its peak memory is that of a device's trainer.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from edgeasync.errors import EdgeAsyncError, GraphError
from edgeasync.graphs.split_base import split_base
from edgeasync.host.child_process import end_with_parent, last_line, limit_memory, run_module
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.temporary import TemporaryFolder
from edgeasync.training.free_memory import field_bytes
from edgeasync.training.gradient_trainer import LocalOptimizer
from edgeasync.training.onnx_trainer import GraphGradient

STEPS_MAX = 20
STEPS_S = 2.0
"""After the first step, the measurement ends after `STEPS_MAX` steps or `STEPS_S` seconds."""


class MeasuredStep(msgspec.Struct, frozen=True):
    """A training step on this machine: its examples, median duration, and the process's peak memory."""

    examples: int
    seconds: float
    memory_bytes: int


_GRAPH = "training.onnx"


class _Request(msgspec.Struct):
    folder: str
    """Folder of the training graph, and of its base if it has one."""
    has_base: bool
    spec: ParameterSpec
    batch_size: int
    threads: int
    bytes_max: int


def measure_step(
    graph: bytes, spec: ParameterSpec, batch_size: int, *, threads: int, s_max: float, bytes_max: int
) -> MeasuredStep:
    """Train on arbitrary examples in a new process, on `threads` cores.

    `s_max` limits the time of the whole measurement, and `bytes_max` the memory of the process, not
    counting libraries. Raises `GraphError` if a limit is exceeded, or if a step fails, and
    `StorageError` if the temporary folder cannot be written.
    """
    folder = TemporaryFolder("step-")
    try:
        split = split_base(graph, folder.path)  # as on a device, which maps the base
        (folder.path / _GRAPH).write_bytes(split.graph)
        has_base = split.base is not None
        request = msgspec.json.encode(_Request(str(folder.path), has_base, spec, batch_size, threads, bytes_max))
        ended = run_module(__name__, request, s_max)
    except subprocess.TimeoutExpired:
        raise GraphError(f"the first steps took longer than {s_max:g} s") from None
    finally:
        folder.remove()
    if ended.returncode:
        raise GraphError(last_line(ended.stderr, ended.returncode))
    return msgspec.json.decode(ended.stdout, type=MeasuredStep)


def time_steps(step: Callable[[], object]) -> float:
    """Return the median seconds per step. The first step is left out, because it includes loading."""
    step()
    begun_s, seconds = time.perf_counter(), list[float]()
    while not seconds or (len(seconds) < STEPS_MAX and time.perf_counter() - begun_s < STEPS_S):
        started_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


# -- in the process --------------------------------------------------------------------------------------------


def main() -> None:
    """Entry point of the process: read a request from standard input, and write a `MeasuredStep`."""
    end_with_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    limit_memory(request.bytes_max)
    try:
        found = _measure(request)
    except MemoryError:
        sys.exit("not enough memory for a step")
    except EdgeAsyncError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


def _measure(request: _Request) -> MeasuredStep:
    spec, folder = request.spec, Path(request.folder)
    gradient = GraphGradient(
        (folder / _GRAPH).read_bytes(),
        spec,
        threads=request.threads,
        provider="cpu",
        base_folder=folder if request.has_base else None,
    )
    x, y = gradient.arbitrary_batch(request.batch_size)
    optimizer = LocalOptimizer((SGD(learning_rate=1e-6),), spec)
    parameters = np.random.default_rng(0).standard_normal(spec.length, np.float32)
    parameters *= 0.05
    out = np.zeros_like(parameters)

    def step() -> None:
        gradient(parameters, x, y, out)
        optimizer.update(parameters, out)

    with np.errstate(all="ignore"):
        seconds = time_steps(step)
    return MeasuredStep(len(y), seconds, field_bytes(Path("/proc/self/status"), "VmHWM:"))


if __name__ == "__main__":
    main()
