"""Train your own numpy model: fit a line with the gradient of the squared error."""

from typing import Any

import numpy as np

from edgeasync import SGD, Stop, train


class Line:
    parameters = {"weight": np.zeros(3), "bias": np.zeros(1)}  # noqa: RUF012

    def gradient(self, arrays: Any, x: Any, y: Any) -> tuple[float, Any]:
        error = x @ arrays["weight"] + arrays["bias"] - y
        return float(error @ error) / len(y), {"weight": 2 * x.T @ error / len(y), "bias": [2 * error.mean()]}


x = np.random.default_rng(0).normal(size=(500, 3))
run = train(Line(), (x, x @ [1.0, -2.0, 0.5] + 3.0), until=Stop(updates=200), optimizer=SGD(learning_rate=0.1))
print(run.arrays)
