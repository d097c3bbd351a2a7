"""Our side of the training benchmark: a device's trainer, which needs few packages.

Those are numpy, onnxruntime and edgeasync. `python -m benchmarks.train_step_ours FOLDER` prints the
end time of its first step and its peak memory.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import train_step_files as files
from edgeasync.data.dataset import Dataset
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.training.onnx_trainer import OnnxTrainer
from edgeasync.training.plan import LocalTraining


def make_step(folder: Path, threads: int) -> Callable[[], float]:
    """Return a function that takes one training step and returns its loss."""
    trainer = OnnxTrainer(
        (folder / files.GRAPH_FILE).read_bytes(),
        msgspec.json.decode((folder / files.SPEC_FILE).read_bytes(), type=ParameterSpec),
        Dataset.of(*files.load_data(folder)),
        LocalTraining(optimizer=(SGD(learning_rate=files.LEARNING_RATE),), batch_size=files.BATCH),
        seed=files.DATA_SEED,
        threads=threads,
        provider="cpu",
    )
    trainer.begin(np.load(folder / files.INITIAL_FILE))

    def step() -> float:
        loss = trainer.step().loss
        assert loss is not None
        return loss

    return step


def main() -> None:
    """Train on one thread from the given folder."""
    files.tell_start_and_peak(make_step(Path(sys.argv[1]), threads=1))
    for package in ("onnx", "torch"):
        if package in sys.modules:
            raise RuntimeError(f"a device has no {package}, but this process has loaded it: its figures are wrong")


if __name__ == "__main__":
    main()
