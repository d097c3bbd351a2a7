"""Train digits on four workers with a JAX loss and an optax optimizer."""

from typing import Any

import jax
import numpy as np
import optax

import edgeasync
from edgeasync.data import load_digits
from edgeasync.policies.frequency import FixedFrequency

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits))
x, y = digits.x[order], digits.y[order]
first, second = jax.random.split(jax.random.key(0))
params = {
    "hidden": {"weight": jax.random.normal(first, (64, 32)) / 8, "bias": jax.numpy.zeros(32)},
    "scores": {"weight": jax.random.normal(second, (32, 10)) / 6, "bias": jax.numpy.zeros(10)},
}


def scores(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden @ params["scores"]["weight"] + params["scores"]["bias"]


def loss(params: Any, x: Any, y: Any) -> Any:
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores(params, x), y).mean()


# Adam has momentum, so the hub uses none: two momentums would multiply.
run = edgeasync.train(
    edgeasync.jax.model(params, loss, optax.adam(0.01), predict=scores),
    (x[:1400], y[:1400]),
    evaluate=(x[1400:], y[1400:]),
    until=edgeasync.Stop(epochs=30),
    policy=edgeasync.Policy(
        optimizer=(edgeasync.SGD(learning_rate=1.0),), frequency=FixedFrequency(local_steps=8)
    ),
)
print(f"accuracy {run.accuracy:.1%} on 397 held-out digits;", jax.tree.map(lambda array: array.shape, run.model))
