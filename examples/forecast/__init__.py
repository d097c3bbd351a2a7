"""Run your own model and trainer as daemons: predict a level that nine of ten readings stay below.

edgeasync has no quantile loss, so hub and devices load this package. Each machine needs it:

    export PYTHONPATH=$PWD/examples
    python -m forecast.readings readings.npz --seed 1
    edgeasync hub examples/forecast/hub.toml
    edgeasync agent --hub tcp://127.0.0.1:5555 --trainer forecast:trainer --data readings.npz
"""

from typing import Any

import numpy as np

from edgeasync import SGD, Dataset, GradientTrainer, Parameter, ParameterSpec, Vector
from edgeasync.data import batches

WINDOW, QUANTILE = 4, 0.9
SPEC = ParameterSpec((Parameter("weight", (WINDOW,)), Parameter("bias", (1,))))


def model() -> tuple[ParameterSpec, dict[str, np.ndarray]]:
    """Return the arrays and their initial values, for the hub: `[model] factory = "forecast:model"`."""
    return SPEC, {"weight": np.zeros(WINDOW), "bias": np.zeros(1)}


def gradient(parameters: Vector, x: np.ndarray, y: np.ndarray, out: Vector) -> float:
    """Write the gradient of the mean pinball loss to `out`, and return the loss."""
    arrays, gradients = SPEC.views(parameters), SPEC.views(out)
    error = y - x @ arrays["weight"] - arrays["bias"]
    slope = np.where(error > 0, -QUANTILE, 1 - QUANTILE).astype(np.float32)
    gradients["weight"][:] = x.T @ slope / len(y)
    gradients["bias"][:] = slope.mean()
    return float(np.mean(-slope * error))


def trainer(welcome: Any, data: Dataset) -> GradientTrainer:
    """Return a trainer for an agent: `--trainer forecast:trainer`. `data` is the file of `--data`."""
    local = welcome.settings["local"]  # the hub's [local]
    stream = batches(data, local["batch_size"], seed=0)
    return GradientTrainer(SPEC, gradient, [SGD(learning_rate=0.05)], stream)
