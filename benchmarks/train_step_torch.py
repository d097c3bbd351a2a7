"""Torch's side of the training benchmark: eager mode, as in torch's tutorials.

`python -m benchmarks.train_step_torch FOLDER` prints the end time of its first step and its peak
memory.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import train_step_files as files
from benchmarks.train_step_models import make


def make_step(folder: Path, threads: int) -> Callable[[], float]:
    """Return a function that takes one training step and returns its loss.

    The folder has the model's name.
    """
    torch.set_num_threads(threads)
    model = make(folder.name)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=files.LEARNING_RATE)
    x, y = files.load_data(folder)
    drawn = batches(torch.from_numpy(x), torch.from_numpy(y))

    def step() -> float:
        inputs, targets = next(drawn)
        optimizer.zero_grad()
        loss: Any = criterion(model(inputs), targets)  # Any: torch leaves `backward` without types
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches forever, shuffled each epoch, as `edgeasync.data.dataset.batches` does."""
    generator = np.random.Generator(np.random.PCG64(files.DATA_SEED))
    while True:
        order = torch.from_numpy(generator.permutation(len(y)))
        for start in range(0, len(y), files.BATCH):
            chosen = order[start : start + files.BATCH]
            yield x[chosen], y[chosen]


def main() -> None:
    """Train on one thread from the given folder."""
    files.tell_start_and_peak(make_step(Path(sys.argv[1]), threads=1))


if __name__ == "__main__":
    main()
