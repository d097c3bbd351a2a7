"""Measure the overhead of `join`, of a torch step and of `train`.

Run as `python -m benchmarks.session`. A loop of 10 ms steps on a 1 MB model alternates between
running alone and joined to a real hub in another process, which assigns 16 steps at a time. Then a
module trains in plain torch and with `edgeasync.torch`, in turns. Finally `train` runs one worker
whose steps take about 5 ms and which exchanges 200,000 values after every 16 steps. It alternates
with a plain loop of the same steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.hub_process import serve_hub
from benchmarks.processes import Children
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync import Dataset, Parameter, ParameterSpec, Policy, StepResult, Stop, Vector, join, train
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.training.plan import LocalTraining

LENGTH = 250_000
STEP_S = 0.010
HELD_UP_MAX = 0.10
OVER_TORCH_MAX = 1.05
OVERHEAD_MAX = 1.2
STEPS_BETWEEN = 16
START_S = 30.0


SPEC = ParameterSpec((Parameter("weight", (200_000,)),))
VALUES, TIMES = 1 << 19, 7
"""Length of the array in a step, and passes over it: about 5 ms if nothing else runs."""


class Steps:
    """A trainer whose steps take about 5 ms.

    It uses numpy without BLAS, whose threads would disturb each other.
    """

    spec = SPEC

    def __init__(self) -> None:
        self._work = np.linspace(-1.0, 1.0, VALUES, dtype=np.float64)
        self._out = np.empty_like(self._work)

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Compute, and change the parameters slightly."""
        for _ in range(TIMES):
            np.tanh(self._work, out=self._out)
        self._parameters += 1e-6
        return StepResult(1.0, 1)


@dataclass(frozen=True)
class Effort:
    """How many turns, and how many steps or exchanges each part takes per turn."""

    rounds: int
    steps: int
    torch_steps: int
    exchanges: int


EFFORTS = {
    Form.FULL: Effort(7, 320, 200, 100),
    Form.SHORT: Effort(3, 160, 100, 30),
    Form.QUICK: Effort(1, 16, 3, 3),
}


def work(until_s: float) -> None:
    """Keep the processor busy until a time."""
    while time.perf_counter() < until_s:
        pass


def loop(steps: int, step: Callable[[], Any]) -> float:
    """Return a loop's seconds: each step is 10 ms of work plus what joining adds."""
    begun_s = time.perf_counter()
    for _ in range(steps):
        work(time.perf_counter() + STEP_S)
        step()
    return time.perf_counter() - begun_s


def held_up(effort: Effort) -> list[float]:
    """Return, for each turn, the share of the joined loop's time that joining adds."""
    shares = []
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        hub = children.start(serve_hub, LENGTH, folder)
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
    """Return, for each turn, a step's time in `edgeasync.torch` over that in torch."""
    import torch
    from torch import nn

    from edgeasync.torch import model  # noqa: PLC0415

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
        """Let both run alternately, so that machine conditions are equal."""
        pairs = [(seconds(trainer.step), seconds(plain)) for _ in range(effort.torch_steps)]
        ours_s, plain_s = zip(*pairs, strict=True)
        return float(statistics.median(ours_s) / statistics.median(plain_s))

    turn()
    return [turn() for _ in range(effort.rounds)]


def time_plain(exchanges: int) -> float:
    """Return the seconds of the steps in a plain loop."""
    trainer, parameters = Steps(), np.zeros(SPEC.length, np.float32)
    begun_s = time.perf_counter()
    for _ in range(exchanges):
        trainer.begin(parameters)
        for _ in range(STEPS_BETWEEN):
            trainer.step()
    return time.perf_counter() - begun_s


def time_train(exchanges: int) -> float:
    """Return the seconds of the same steps in `train`."""
    trainer = Steps()
    begun_s = time.perf_counter()
    run = train(
        {"weight": np.zeros(SPEC.length, np.float32)},
        [trainer],
        until=Stop(updates=exchanges),
        policy=Policy(frequency=FixedFrequency(local_steps=STEPS_BETWEEN)),
    )
    seconds = time.perf_counter() - begun_s
    if run.updates != exchanges:
        raise RuntimeError(f"{run.updates} updates instead of {exchanges}")
    return seconds


def over_plain(effort: Effort) -> list[float]:
    """Return, for each turn, the time of `train` over that of a plain loop.

    The time of `train` includes the start of hub and worker, every exchange, and the end.
    """
    turns = [(time_train(effort.exchanges), time_plain(effort.exchanges)) for _ in range(effort.rounds)]
    return [ours_s / plain_s for ours_s, plain_s in turns]


PARTS = {
    "loop": ("the loop is held up, share of its time", held_up, HELD_UP_MAX),
    "torch": ("a step of edgeasync.torch over torch's", over_torch, OVER_TORCH_MAX),
    "train": ("train over a plain loop", over_plain, OVERHEAD_MAX),
}
"""Part -> what is measured, how, and its bound."""


@benchmark("What `join`, the torch trainer and `train` add to the time of training.", PARTS)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts, and compare them with their bounds."""
    effort = EFFORTS[arguments.form]
    for part in arguments.part:
        name, measure, bound = PARTS[part]
        show_progress(f"{part}: {effort.rounds} rounds")
        turns = measure(effort)
        median = statistics.median(turns)
        results.add("of the turns", name, {"median": median, "worst": max(turns)}, 4)
        results.bound(name, median, bound)


if __name__ == "__main__":
    main()
