"""What it costs a loop to join a run, and a torch step to be edgeasync's.

Run as `python -m benchmarks.session`. A loop of steps of 10 ms on a model of 1 MB joins a real hub in another
process, which assigns 16 steps at a time; the same loop alone takes turns with it. Then a module trains by itself,
and by `edgeasync.torch`, in turns. It ends with exit code 1 if a bound is missed.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.children import Child
from benchmarks.exchange_servers import serve_ours
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results

LENGTH = 250_000
STEP_S = 0.010
HELD_UP_MAX = 0.10
OVER_TORCH_MAX = 1.05
START_S = 30.0


@dataclass(frozen=True)
class Effort:
    """How many turns, steps of the loop in each, and steps of torch in each."""

    rounds: int
    steps: int
    torch_steps: int


EFFORTS = {Form.FULL: Effort(7, 320, 200), Form.SHORT: Effort(3, 160, 100), Form.QUICK: Effort(1, 16, 3)}


def work(until_s: float) -> None:
    """Be busy until then."""
    while time.perf_counter() < until_s:
        pass


def loop(steps: int, step: Callable[[], Any]) -> float:
    """Return the seconds that a loop takes: each step is 10 ms of work, and what comes with it."""
    begun_s = time.perf_counter()
    for _ in range(steps):
        work(time.perf_counter() + STEP_S)
        step()
    return time.perf_counter() - begun_s


def serve(run: str, pipe: "Connection[str, None]") -> None:
    """Run the hub."""
    serve_ours(LENGTH, run, pipe)


def held_up(effort: Effort) -> list[float]:
    """Return the share of the joined loop's time that is beyond the loop's own, for each turn."""
    from edgeasync import join  # noqa: PLC0415 - the hub's process needs none of it

    shares = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        hub = Child(context, serve, folder)
        ended.callback(hub.kill)
        model = {"weights": np.zeros(LENGTH, np.float32)}
        with join(hub.hear(START_S), model, name="loop", timeout_s=START_S) as session:
            loop(16, session.step)
            for _ in range(effort.rounds):
                alone_s = loop(effort.steps, lambda: None)
                joined_s = loop(effort.steps, session.step)
                shares.append((joined_s - alone_s) / joined_s)
            if session.exchanges < effort.rounds * effort.steps // 16:
                raise RuntimeError(f"only {session.exchanges} exchanges")
    return shares


def over_torch(effort: Effort) -> list[float]:
    """Return the time of a step of `edgeasync.torch` over that of a step of torch, for each turn."""
    import torch
    from torch import nn

    from edgeasync import Dataset  # noqa: PLC0415
    from edgeasync.torch import model  # noqa: PLC0415
    from edgeasync.training.plan import LocalTraining  # noqa: PLC0415

    torch.set_num_threads(1)
    batch = 32
    module = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 64), nn.Linear(64, 10)
    )
    x = np.random.default_rng(0).normal(size=(10 * batch, 1, 28, 28)).astype(np.float32)
    y = np.arange(10 * batch) % 10
    prepared = model(module).prepare(LocalTraining(batch_size=batch))
    trainer = prepared.make_trainer(Dataset.of(x, y), 0, 1)
    trainer.begin(prepared.initial.copy())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    loader = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    random = np.random.default_rng(0)

    def plain() -> None:
        rows = torch.from_numpy(random.permutation(len(loader))[:batch])
        inputs, targets = loader.tensors[0][rows], loader.tensors[1][rows]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        float(loss.detach())

    def seconds(step: Callable[[], Any]) -> float:
        begun_s = time.perf_counter()
        step()
        return time.perf_counter() - begun_s

    def turn() -> float:
        """Let both take steps one after the other, so that they see the same machine."""
        pairs = [(seconds(trainer.step), seconds(plain)) for _ in range(effort.torch_steps)]
        ours_s, plain_s = zip(*pairs, strict=True)
        return float(statistics.median(ours_s) / statistics.median(plain_s))

    turn()
    return [turn() for _ in range(effort.rounds)]


def main() -> None:
    """Measure both, and hold them to their bounds."""
    arguments = make_parser("What joining costs a loop.").parse_args()
    effort = EFFORTS[arguments.form]
    results = Results()
    show_progress(f"a loop that joins: {effort.rounds} rounds")
    held = statistics.median(held_up(effort))
    show_progress("torch's steps")
    over = statistics.median(over_torch(effort))
    results.add("shares", "loop of 10 ms steps, 1 MB", {"held up": round(held, 4)})
    results.add("over torch", "a step", {"edgeasync.torch": round(over, 3)})
    results.bound("the loop is held up, share of its time", held, HELD_UP_MAX)
    results.bound("a step of edgeasync.torch over torch's", over, OVER_TORCH_MAX)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
