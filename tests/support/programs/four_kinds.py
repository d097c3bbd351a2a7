"""A perceptron for digits in numpy, with the names and shapes of torch."""

import numpy as np

from edgeasync.data import load_digits


def digits():
    """Return training examples and held-out ones, in an order drawn once."""
    found = load_digits()
    order = np.random.default_rng(4).permutation(len(found))
    x, y = found.x[order], found.y[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def start():
    """Return the first values, as torch has them: weights (outputs, inputs)."""
    draw = np.random.default_rng(8)
    return {
        "0.weight": draw.normal(0, 0.15, (32, 64)).astype(np.float32),
        "0.bias": np.zeros(32, np.float32),
        "2.weight": draw.normal(0, 0.2, (10, 32)).astype(np.float32),
        "2.bias": np.zeros(10, np.float32),
    }


class NumpyModel:
    """The model of a device that has numpy alone."""

    def __init__(self):
        self.parameters = start()

    def gradient(self, arrays, x, y):
        hidden = np.maximum(x @ arrays["0.weight"].T + arrays["0.bias"], 0)
        scores = hidden @ arrays["2.weight"].T + arrays["2.bias"]
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(y)), y]).mean()
        slope = chances
        slope[np.arange(len(y)), y] -= 1
        slope /= len(y)
        back = (slope @ arrays["2.weight"]) * (hidden > 0)
        return loss, {
            "2.weight": slope.T @ hidden,
            "2.bias": slope.sum(axis=0),
            "0.weight": back.T @ x,
            "0.bias": back.sum(axis=0),
        }
