"""Measure the memory of training beside a quantized base, compared with inference.

Run as `python -m benchmarks.quantized_base` on Linux, which reports the peak. The exit code is 1 if
a peak exceeds its bound.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.processes import Child, Children, peak_resident_bytes, resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import Base, GraphSettings
from edgeasync.graphs.split_base import split_base
from edgeasync.parameters import ParameterSpec
from edgeasync.training.onnx_session import SMALLEST_GRAPH, open_session
from edgeasync.training.onnx_trainer import GraphGradient

MIB = 1 << 20
ROWS = 8
STEPS = 3
BOUNDS: dict[Base, float] = {"int8": 1.15, "int4": 1.5}
"""Peak of training divided by that of inference with the same file."""


@dataclass(frozen=True)
class Effort:
    """The model's layers, their width, and the number of processes for each peak."""

    layers: int
    width: int
    processes: int


# 16 layers of 4 MiB in float32.
EFFORTS = {Form.FULL: Effort(16, 1024, 5), Form.SHORT: Effort(16, 1024, 2), Form.QUICK: Effort(2, 64, 1)}


def bare_bytes() -> int:
    """Return this process's memory before it loads a model, but after onnxruntime has started."""
    session = open_session(SMALLEST_GRAPH, 1, "cpu")
    session.run(None, {"x": np.ones(1, np.float32)})
    return resident_bytes(os.getpid())


def infer(file: Path, width: int, pipe: "Connection[Any, Any]") -> None:
    """Run a forward model as a program without edgeasync would. Send the peak over the bare process."""
    bare = bare_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    x = np.ones((ROWS, width), np.float32)
    for _ in range(STEPS):
        session.run(None, {"x": x})
    pipe.send(peak_resident_bytes(os.getpid()) - bare)


def train(file: Path, spec: ParameterSpec, base_folder: Path | None, pipe: "Connection[Any, Any]") -> None:
    """Compute gradients as a device does. Send the peak over the bare process."""
    bare = bare_bytes()
    gradient = GraphGradient(file.read_bytes(), spec, provider="cpu", base_folder=base_folder)
    x, y = gradient.arbitrary_batch(ROWS)
    parameters, out = np.ones(spec.length, np.float32), np.zeros(spec.length, np.float32)
    for _ in range(STEPS):
        gradient(parameters, x, y, out)
    pipe.send(peak_resident_bytes(os.getpid()) - bare)


def settings_of(trained: str, base: Base, layers: int) -> GraphSettings:
    """Return the settings to train the last layer alone, or an adapter beside each layer."""
    if trained == "head":
        return GraphSettings(base=base, train=(f"{2 * layers}.*",))
    return GraphSettings(base=base, lora=4)


def peak_of(children: Children, effort: Effort, what: str, target: Any, *arguments: object) -> float:
    """Return the median of the peaks of new processes, in bytes."""
    peaks = list[float]()
    for number in range(effort.processes):
        show_progress(f"{what}: process {number + 1} of {effort.processes}")
        child: Child = children.start(target, *arguments)
        peaks.append(child.hear())
    return statistics.median(peaks)


@benchmark("The peak of training beside a quantized base, compared with inference.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure each type of base, training the last layer or adapters."""
    effort: Effort = EFFORTS[arguments.form]
    width = effort.width
    layers = [layer for _ in range(effort.layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.to_onnx(nn.Sequential(*layers, nn.Linear(width, 10)), (width,)).SerializeToString()
    with tempfile.TemporaryDirectory() as name, Children("edgeasync.training.onnx_trainer") as children:
        for base, bound in BOUNDS.items():
            for trained in ("head", "adapters"):
                built = build_training_graph(model, settings_of(trained, base, effort.layers))
                assert built.forward is not None
                folder = Path(name, base, trained)
                folder.mkdir(parents=True)
                (folder / "forward.onnx").write_bytes(built.forward)
                split = split_base(built.model, folder)
                (folder / "training.onnx").write_bytes(split.graph)
                row = f"{base}, {trained}"
                spec, base_folder = built.spec, None if split.base is None else folder
                inference = peak_of(children, effort, f"{row}: inference", infer, folder / "forward.onnx", width)
                ours = peak_of(children, effort, row, train, folder / "training.onnx", spec, base_folder)
                sizes = {"file": len(built.forward) / MIB, "float32 file": len(model) / MIB}
                peaks = {"training": ours / MIB, "inference": inference / MIB, "ratio": ours / inference}
                results.add("memory, MiB", row, sizes | peaks, 2)
                results.bound(row, ours / inference, bound)


if __name__ == "__main__":
    main()
