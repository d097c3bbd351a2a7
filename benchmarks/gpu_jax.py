"""The GPU case of JAX: a training loop that joins a run."""

import os
import time
from typing import Any

import numpy as np

from benchmarks.gpu_devices import (
    OVERLAP_STEPS,
    START_S,
    Case,
    Figures,
    Traffic,
    accuracies,
    copied,
    digits,
    fit,
    hub_process,
    summed_up,
    tree,
    warm_up,
)

BATCH = 64
LEARNING_RATE = 0.05
SETTLE_S = 0.5


class Loop:
    """A JAX training loop: a compiled step on a batch, lengthened by matrix products.

    The number of products is compiled in, because a GPU asks the host after each iteration of a
    loop of unknown length.
    """

    def __init__(self, case: Case, device: Any) -> None:
        import jax
        from jax import numpy as jnp

        from edgeasync.jax.parameters import Params  # noqa: PLC0415

        traffic = self.traffic = Traffic()

        class Counted(Params):
            """Counts what a session copies."""

            def begin_read(self, arrays: Any) -> Any:
                traffic.count(4 * sum(array.size for array in arrays.values()))
                return super().begin_read(arrays)

            def write(self, arrays: Any) -> None:
                traffic.count(4 * sum(array.size for array in arrays.values()))
                super().write(arrays)
                traffic.end_exchange()

            def stage(self, arrays: Any) -> None:
                traffic.count(4 * sum(array.size for array in arrays.values()))
                super().stage(arrays)

            def add(self, arrays: Any) -> None:
                super().add(arrays)
                traffic.end_exchange()

        self._jax, self._case, self.products = jax, case, 0
        params = {name: jax.device_put(array, device) for name, array in tree(case.effort.width).items()}
        self.held = Counted(params, None, None)
        (x, y), _ = digits()
        self._x, self._y = jax.device_put(x, device), jax.device_put(y, device)
        size = 2048 if case.on_gpu else 64
        self._left = jax.device_put(np.ones((size, size), np.float32) / size, device)
        self._order = np.random.default_rng(0)

        def scores(params: Any, x: Any) -> Any:
            x = jax.nn.relu(x @ params["weight0"] + params["bias0"])
            x = jax.nn.relu(x @ params["weight1"] + params["bias1"])
            return x @ params["weight2"] + params["bias2"]

        def loss(params: Any, x: Any, y: Any) -> Any:
            return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], 1).mean()

        def step(params: Any, start: Any) -> Any:
            x = jax.lax.dynamic_slice_in_dim(self._x, start, BATCH)
            y = jax.lax.dynamic_slice_in_dim(self._y, start, BATCH)
            value, gradients = jax.value_and_grad(loss)(params, x, y)
            return jax.tree.map(lambda own, slope: own - LEARNING_RATE * slope, params, gradients), value

        def work(value: Any, left: Any, count: int) -> Any:
            """Return the value once the products are computed."""
            product = jax.lax.fori_loop(0, count, lambda _, product: product @ left, left)
            return value + 1e-30 * product[0, 0]

        self._step, self._work, self._scores = jax.jit(step), jax.jit(work, static_argnums=2), jax.jit(scores)

    def take(self, steps: int, session: Any = None) -> float:
        """Run some steps; return their seconds."""
        self._jax.block_until_ready(self.held.value)
        begun_s = time.perf_counter()
        for _ in range(steps):
            start = int(self._order.integers(len(self._x) - BATCH))
            self.held.value, value = self._step(self.held.value, start)
            float(self._work(value, self._left, self.products))
            if session is not None:
                session.step()
        self._jax.block_until_ready(self.held.value)
        return time.perf_counter() - begun_s

    def draw_out(self, products: int) -> None:
        """Set how many products a step computes."""
        self.products = products

    def accuracy(self) -> float:
        """Return the accuracy on held-out digits."""
        _, (x, y) = digits()
        return float((np.asarray(self._scores(self.held.value, x)).argmax(1) == y).mean())


def joined(case: Case) -> Figures:
    """Measure a loop that alternates between running alone and running joined.

    Both take the same steps on the same data.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    effort = case.effort
    with hub_process(tree, effort.width, OVERLAP_STEPS) as address:
        import jax

        from edgeasync import join  # noqa: PLC0415
        from edgeasync.jax import trees  # noqa: PLC0415

        device = jax.devices("gpu" if case.on_gpu else "cpu")[0]
        alone, other = Loop(case, device), Loop(case, device)
        other.take(fit(alone.take, alone.draw_out, effort.step_s))
        other.draw_out(alone.products)
        before = _used(device)
        turns = []
        with join(address(), other.held, name="loop", own_start=True, timeout_s=START_S) as session:
            for _ in warm_up(session):
                alone.take(16)
                other.take(16, session)
            begun, before_copies = session.exchanges, other.traffic.ended
            for _ in range(effort.rounds):
                time.sleep(SETTLE_S * case.on_gpu)
                alone_s, had = alone.take(effort.steps), session.exchanges
                joined_s = other.take(effort.steps, session)
                turns.append((alone_s, joined_s, effort.steps, session.exchanges - had))
            extra = _used(device) - before
            exchanges = session.exchanges - begun
            figures = copied(before_copies, other.traffic.ended, exchanges) | summed_up(turns)
        if case.on_gpu and trees.gpu_of(other.held.value) is None:
            raise RuntimeError("the tree has left the GPU")
        return {
            **figures,
            "MB on the GPU beside the module's": round(extra / 1e6, 3),
            **accuracies(alone.accuracy(), other.accuracy()),
        }


def _used(device: Any) -> int:
    """Return the bytes of arrays on a GPU, or 0 if JAX does not report them."""
    return int((device.memory_stats() or {}).get("bytes_in_use", 0))
