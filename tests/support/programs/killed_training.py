"""A program that trains until it is killed, and continues when it is started again.

    python -m tests.support.programs.killed_training KIND FOLDER EPOCHS [WORKERS]

It prints "begun" before it trains. At the end it writes the model's values to FOLDER/result.npz.
"""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from edgeasync import SGD, Adam, nn
from edgeasync.async_train import FaultTolerantTrainer
from edgeasync.training.numpy_models import SoftmaxModel

EXAMPLES, BATCH_SIZE = 330, 8
"""The last batch of an epoch is short, and the last update has fewer steps."""

STEPS = 5
"""Between two updates."""


def examples():
    """Return digits that a model of 16 inputs learns."""
    generator = np.random.default_rng(5)
    centres = generator.normal(size=(4, 16))
    y = np.arange(EXAMPLES) % 4
    return (centres[y] + generator.normal(size=(EXAMPLES, 16))).astype(np.float32), y


class Logistic:
    """A custom model."""

    def __init__(self):
        self.parameters = {"w": np.zeros((16, 4)), "b": np.zeros(4)}

    def gradient(self, arrays, x, y):
        """Return a batch's mean loss, and its gradients."""
        scores = x @ arrays["w"] + arrays["b"]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(y)), y]).mean()
        shares[np.arange(len(y)), y] -= 1.0
        return loss, {"w": x.T @ shares / len(y), "b": shares.mean(0)}


def onnx_model():
    """Return a model with dropout and a batch norm."""
    layers = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))
    return nn.to_onnx(layers, (16,), seed=3)


def torch_arguments(*, own_generator=False):
    """Return a torch module, and what it trains with: Adam, and a loader that shuffles."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(11)
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 24),
        torch.nn.BatchNorm1d(24),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(24, 4),
    )
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, examples()))
    generator = torch.Generator().manual_seed(4) if own_generator else None
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, generator=generator)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return module, {"dataset": loader, "optimizer": optimizer, "loss_fn": torch.nn.CrossEntropyLoss()}


def arguments(kind):
    """Return the model of a kind, and arguments of `train`."""
    common = {"dataset": examples(), "batch_size": BATCH_SIZE}
    match kind:
        case "numpy":
            return SoftmaxModel(inputs=16, classes=4), common | {
                "optimizer": SGD(learning_rate=0.05, momentum=0.9)
            }
        case "custom":
            return Logistic(), common | {"optimizer": SGD(learning_rate=0.05, momentum=0.9)}
        case "layers":
            layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
            return layers, common | {"optimizer": Adam(learning_rate=0.01)}
        case "onnx":
            return onnx_model(), common | {"optimizer": Adam(learning_rate=0.01)}
        case "torch":
            return torch_arguments()
        case "torch with a generator":
            return torch_arguments(own_generator=True)
        case "torch on data":
            module, given = torch_arguments()
            return module, common | {"optimizer": given["optimizer"]}
    raise ValueError(kind)


def main(kind, folder, epochs, workers="1"):
    """Train."""
    model, given = arguments(kind)
    trainer = FaultTolerantTrainer(
        model, folder, checkpoint_frequency=40, workers=int(workers), update_frequency=STEPS, seed=2
    )
    print("begun", flush=True)  # noqa: T201 - the test waits for it
    run = trainer.train(epochs=int(epochs), **given)
    np.savez(Path(folder) / "result.tmp.npz", **run.arrays)
    (Path(folder) / "result.tmp.npz").replace(Path(folder) / "result.npz")


def run_once(kind, folder, epochs, *, workers=1, after_s=None, under=()):
    """Run the program, to its end or to its kill `after_s` its training began; return whether it was killed."""
    arguments = [kind, folder, epochs, workers]
    command = [*under, sys.executable, "-m", "tests.support.programs.killed_training", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        process.stdout.readline()
        if after_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
            process.kill()
        process.stdout.read()
    return process.returncode < 0


def kill_at_random(kind, folder, epochs, *, kills, workers=1):
    """Kill the program at moments drawn from a seed, then let it end; kill it at least once."""
    draw = random.Random(kind)
    killed = [
        run_once(kind, folder, epochs, workers=workers, after_s=draw.uniform(0.05, 0.4)) for _ in range(kills)
    ]
    assert any(killed)
    run_once(kind, folder, epochs, workers=workers)
    return killed


if __name__ == "__main__":
    main(*sys.argv[1:])
