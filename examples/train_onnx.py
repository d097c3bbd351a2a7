"""An ONNX model trained from Python, hub and agents in one process: digits parted unequally among four devices.

    python train_onnx.py --updates 300 --run runs/train-onnx

The same model and settings work over the network by `edgeasync hub --model` and `edgeasync agent`.
"""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from digits_cnn import network
from sklearn.datasets import load_digits

import edgeasync
from edgeasync.data import dirichlet


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an ONNX model in one process.")
    parser.add_argument("--updates", type=int, default=300, help="updates to apply before it ends")
    parser.add_argument("--run", type=Path, default=Path("runs/train-onnx"), help="folder that keeps the model")
    arguments = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    data = edgeasync.Dataset.of(x / 16, y)
    order = np.random.default_rng(0).permutation(len(data))
    held_out = data.take(order[:360])
    parts = dirichlet(data.take(order[360:]), 4, 0.5, seed=0, examples_min=32)

    run = edgeasync.train(
        network,
        parts,
        evaluate=held_out,
        run=arguments.run,
        until=edgeasync.Stop(updates=arguments.updates),
        optimizer=edgeasync.SGD(learning_rate=0.1),
    )
    path = run.export(arguments.run / "trained.onnx")
    scores = np.asarray(onnxruntime.InferenceSession(path).run(None, {"x": held_out.x})[0])
    accuracy = (scores.argmax(axis=1) == held_out.y).mean()
    print(f"accuracy on {len(held_out)} digits that no device had: {accuracy:.1%}")


if __name__ == "__main__":
    main()
