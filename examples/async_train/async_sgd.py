"""Train a class of this script, without a main guard, in two processes: `python async_sgd.py [DATA]`."""

import sys

import numpy as np

from edgeasync.async_train import async_sgd, data


class Softmax:
    """A model in numpy."""

    def __init__(self) -> None:
        self.parameters = {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}

    def scores(self, arrays: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        found: np.ndarray = x.reshape(len(x), -1) @ arrays["weight"] + arrays["bias"]
        return found

    def gradient(
        self, arrays: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        scores = self.scores(arrays, x)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        error = (shares - np.eye(10)[y]) / len(y)
        loss = -np.log(shares[np.arange(len(y)), y]).mean()
        return float(loss), {"weight": x.reshape(len(x), -1).T @ error, "bias": error.sum(axis=0)}


root = sys.argv[1] if len(sys.argv) > 1 else "data"
loader = data.DataLoader(data.MNIST(root, train=True), batch_size=16, shuffle=True)
model = async_sgd(Softmax(), loader, num_workers=2, num_epochs=20, lr=0.1)
for x, y in data.DataLoader(data.MNIST(root, train=False), batch_size=1000):
    print(f"accuracy: {(model.scores(model.parameters, x).argmax(axis=1) == y).mean():.2%}")
