"""Trains two steps on batches of 512 images, in a process of its own, and prints what that took.

    python -m tests.support.programs.large_batch LIMIT_BYTES sees|blind plain|norm

With a limit the process may take that much more address space than it has once the model is built; `blind` hides
that from the trainer. `norm`: the model has a batch norm.
"""

import json
import logging
import resource
import sys
from pathlib import Path

import numpy as np

from edgeasync import SGD, Dataset, OnnxTrainer, nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import EdgeAsyncError
from edgeasync.training.free_memory import field_bytes
from edgeasync.training.micro_batches import Machine
from edgeasync.training.plan import LocalTraining

EXAMPLES = 512
STATUS = Path("/proc/self/status")


class Blind(Machine):
    """A machine that seems to have all the memory there is."""

    def free_bytes(self):
        return 1 << 40


def main(limit_bytes, sight, kind):
    logging.basicConfig(stream=sys.stderr)
    features = nn.Conv2d(1, 32, 5, padding=2), *([nn.BatchNorm2d(32)] if kind == "norm" else []), nn.ReLU()
    layers = nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 28 * 28, 10))
    built = build_training_graph(nn.to_onnx(layers, (1, 28, 28)).SerializeToString(), GraphSettings())
    random = np.random.default_rng(0)
    data = Dataset.of(random.normal(size=(EXAMPLES, 1, 28, 28)).astype(np.float32), np.arange(EXAMPLES) % 10)
    before, resident = field_bytes(STATUS, "VmSize:"), field_bytes(STATUS, "VmRSS:")
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (before + limit_bytes, before + limit_bytes))
    machine = Blind() if sight == "blind" else Machine()
    local = LocalTraining(optimizer=(SGD(learning_rate=0.01),), batch_size=EXAMPLES)
    trainer = OnnxTrainer(built.model, built.spec, data, local, machine=machine)
    trainer.begin(built.initial.copy())
    losses = [trainer.step().loss for _ in range(2)]
    peak = field_bytes(STATUS, "VmHWM:")
    sys.stdout.write(json.dumps({
        "losses": losses,
        "needed": peak - resident,
        "private": peak - field_bytes(STATUS, "RssFile:"),
    }))  # fmt: skip


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), *sys.argv[2:])
    except EdgeAsyncError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
