"""Write the files that both sides of the training benchmark read.

Run as `python -m benchmarks.train_step_prepare FOLDER MODEL...`. It runs in its own process, so
that no measured process loads the packages of exporter and graph builder.
"""

import sys
import warnings
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks import train_step_files as files
from benchmarks.train_step_models import CLASSES, MODELS, make
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings


def write_model(name: str, folder: Path) -> None:
    """Write one model's folder."""
    folder.mkdir()
    shape = MODELS[name].shape
    built = build_training_graph(export(name, folder / files.FORWARD_FILE), GraphSettings())
    (folder / files.GRAPH_FILE).write_bytes(built.model)
    (folder / files.SPEC_FILE).write_bytes(msgspec.json.encode(built.spec))
    np.save(folder / files.INITIAL_FILE, built.initial)
    generator = np.random.Generator(np.random.PCG64(files.DATA_SEED))
    np.save(folder / files.X_FILE, generator.standard_normal((files.EXAMPLES, *shape), np.float32))
    np.save(folder / files.Y_FILE, generator.integers(0, CLASSES, files.EXAMPLES))


def export(name: str, file: Path) -> bytes:
    """Write a model with its initial weights as ONNX, for any batch size, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            make(name),
            (torch.zeros(2, *MODELS[name].shape),),
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            opset_version=20,
        )
    return file.read_bytes()


def main() -> None:
    """Write all given models."""
    folder, *names = sys.argv[1:]
    for name in names:
        write_model(name, Path(folder) / name)


if __name__ == "__main__":
    main()
