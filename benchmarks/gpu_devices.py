"""Shared parts of the GPU cases: sizes, data, networks, the hub and copy counters."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.processes import Child
from benchmarks.report import Form
from edgeasync import SGD, Hub, Policy
from edgeasync.data import load_digits
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency

LOCAL_STEPS = 16
OVERLAP_STEPS = 64
"""Overlapped steps per exchange, where allowed: with 10 ms each, more than a second."""

START_S = 60.0
TRAINED = 1400
"""Digits for training; the rest are for evaluation."""

CODEC = {"push": "identity", "model": "identity", "delta": "off"}
"""Float32 in both directions, which needs the most bytes."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Effort:
    """Sizes: the large network's width, a step's time, and how much is measured."""

    width: int
    step_s: float
    rounds: int
    steps: int
    passes: int


EFFORTS = {
    Form.FULL: Effort(4963, 0.010, 3, 160, 30),
    Form.SHORT: Effort(4963, 0.010, 2, 96, 20),
    Form.QUICK: Effort(32, 0.001, 1, 48, 2),
}
"""A width of 4,963 gives 25 million parameters, 100 MB."""


@dataclass(frozen=True)
class Case:
    """The device of a case, and how thoroughly to measure it."""

    device: str
    form: Form
    name: str = "float32"

    @property
    def effort(self) -> Effort:
        """The sizes."""
        return EFFORTS[self.form]

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU. In tests it is a CPU."""
        return self.device != "cpu"


Data = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def digits() -> tuple[Data, Data]:
    """Return digits for training and digits for evaluation."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found))
    x, y = found.x[order], found.y[order]
    y = y.astype(np.int64)
    return (x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:])


def network(width: int) -> Any:
    """Return a torch perceptron with two hidden layers: width * (width + 77) + 10 parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )


def tree(width: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the same perceptron as arrays for JAX."""
    draw = np.random.default_rng(0)
    sizes = [64, width, width, 10]
    found = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        found[f"weight{number}"] = (draw.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
        found[f"bias{number}"] = np.zeros(outputs, np.float32)
    return found


def torch_model(width: int) -> Any:
    """Return the network as a hub's model."""
    from edgeasync.torch import model  # noqa: PLC0415 - the case of JAX needs no torch

    return model(network(width))


def policy(overlap_steps: int) -> Policy:
    """Return the hub's policy: each update makes a version, and an update has 16 steps."""
    return Policy(
        aggregate=ImmediateAggregator(),
        optimizer=(SGD(),),
        frequency=FixedFrequency(local_steps=LOCAL_STEPS),
        overlap_steps_max=overlap_steps,
    )


def open_hub(model: Any, run: str, overlap_steps: int) -> Hub:
    """Return the hub of a case, without a journal, like the hubs of other benchmarks."""
    return Hub(
        model,
        run=run,
        bind="tcp://127.0.0.1:*",
        policy=policy(overlap_steps),
        settings={"codec": CODEC, "hub": {"durability": "checkpoint"}},
    )


def _serve(
    make: Callable[[int], Any], width: int, run: str, overlap_steps: int, pipe: "Connection[Any, None]"
) -> None:
    with open_hub(make(width), run, overlap_steps) as hub:
        pipe.send(hub.address)
        while True:
            time.sleep(1.0)


@contextmanager
def hub_process(make: Callable[[int], Any], width: int, overlap_steps: int) -> Iterator[Callable[[], str]]:
    """Run a hub in its own process; yield a function that returns its address once it listens."""
    with tempfile.TemporaryDirectory() as run:
        child = Child(multiprocessing.get_context("spawn"), _serve, make, width, run, overlap_steps)
        try:
            yield lambda: str(child.hear(START_S))
        finally:
            child.kill()


class Traffic:
    """Counts the copies between host and GPU, in total and within completed exchanges."""

    def __init__(self) -> None:
        self.copies = self.bytes = 0
        self.ended = (0, 0)
        """Copies and bytes up to the last model that a loop received.

        Later ones belong to the next exchange.
        """

    def count(self, nbytes: int) -> None:
        """Count a copy."""
        self.copies, self.bytes = self.copies + 1, self.bytes + nbytes

    def end_exchange(self) -> None:
        """Record that the loop has received a model."""
        self.ended = self.copies, self.bytes


class CountingLink:
    """A link between host and GPU that counts the copies."""

    def __init__(self, link: Any, traffic: Traffic) -> None:
        self._link, self._traffic = link, traffic
        self._on_device: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def device_buffer(self, length: int) -> Any:
        """Return a buffer on the GPU."""
        buffer = self._link.device_buffer(length)
        self._on_device.add(buffer.data_ptr())
        return buffer

    def copy(self, target: Any, source: Any, after: Any) -> Any:
        """Copy and count; the loop's thread copies a model to the GPU when it receives it."""
        self._traffic.count(4 * len(source))
        if source.data_ptr() not in self._on_device:
            self._traffic.end_exchange()
        return self._link.copy(target, source, after)


class HostLink:
    """A stand-in for a GPU in tests: it uses host memory, and copies end at once."""

    def host_buffer(self, length: int) -> Any:
        """Return a buffer in memory."""
        import torch

        return torch.empty(length)

    device_buffer = host_buffer

    def mark(self) -> "HostLink":
        """Return a finished event."""
        return self

    def copy(self, target: Any, source: Any, after: Any) -> "HostLink":  # noqa: ARG002
        """Copy at once."""
        target.copy_(source)
        return self

    def order(self, event: Any) -> None:
        """Do nothing: operations are already in order."""

    def synchronize(self) -> None:
        """Do nothing: copies have already ended."""


@contextmanager
def counted_links(case: Case) -> Iterator[Traffic]:
    """Count what edgeasync copies between host and GPU, through each module's own link."""
    from edgeasync.sdk import torch_copies  # noqa: PLC0415

    traffic = Traffic()
    link_to = torch_copies.link_to

    def counted(device: Any) -> Any:
        return CountingLink(link_to(device) if case.on_gpu else HostLink(), traffic)

    torch_copies.link_to = counted
    try:
        yield traffic
    finally:
        torch_copies.link_to = link_to


FIT_STEPS = 16
FIT_ROUNDS = 5
FIT_WITHIN = 0.02
"""Tolerance of a step's time, as a share of the target, above which another round follows."""


def fit(take: Callable[[int], float], draw_out: Callable[[int], None], step_s: float) -> int:
    """Lengthen a loop's steps to `step_s`; return how many steps that took.

    `take` runs some steps and returns their seconds. `draw_out` sets how many matrix products a
    step computes.
    """
    taken = 0

    def measured(products: int) -> float:
        """Return a step's seconds.

        The first steps of a kind are slow, so it repeats until two figures agree.
        """
        nonlocal taken
        draw_out(products)
        before_s, now_s = 0.0, float("inf")
        for _ in range(FIT_ROUNDS):
            before_s, now_s = now_s, take(FIT_STEPS) / FIT_STEPS
            taken += FIT_STEPS
            if abs(now_s - before_s) <= FIT_WITHIN * now_s:
                break
        return now_s

    products = 16
    for _ in range(FIT_ROUNDS):
        own_s, drawn_out_s = measured(0), measured(products)
        product_s = max((drawn_out_s - own_s) / products, drawn_out_s / products / 8)  # the device may yet be slow
        fitting = max(0, round((step_s - own_s) / product_s))
        draw_out(fitting)
        if own_s >= step_s or abs(measured(fitting) - step_s) <= FIT_WITHIN * step_s:
            break
        products = max(fitting, 1)
    return taken


WARM_UP = 3
"""Exchanges before the first measurement."""


def warm_up(session: Any) -> Iterator[None]:
    """Yield for a few steps at a time, until some exchanges have completed."""
    until_s = time.monotonic() + START_S
    while session.exchanges <= WARM_UP and time.monotonic() < until_s:
        yield


def summed_up(turns: list[tuple[float, float, int, int]]) -> Figures:
    """Return the figures of all turns.

    A turn has the seconds of its steps alone and joined, the number of steps, and the exchanges
    when joined.
    """
    alone_s, joined_s, steps, exchanges = (sum(column) for column in zip(*turns, strict=True))
    held = [(joined - alone) / joined for alone, joined, _, _ in turns]
    return {
        "steps/s alone": round(steps / alone_s, 2),
        "steps/s joined": round(steps / joined_s, 2),
        "ms a step alone": round(1000 * alone_s / steps, 3),
        "joined over alone": round(alone_s / joined_s, 4),
        "held up %": round(100 * float(np.median(held)), 2),
        "ms held up an exchange": round(1000 * (joined_s - alone_s) / max(1, exchanges), 2),
        "steps an exchange": round(steps / max(1, exchanges), 1),
    }


def copied(before: tuple[int, int], after: tuple[int, int], exchanges: int) -> Figures:
    """Return the copies per exchange or assignment, from counts before and after."""
    if exchanges < 1:
        raise RuntimeError("no exchange took place in the measured time")
    copies, nbytes = (later - sooner for sooner, later in zip(before, after, strict=True))
    return {
        "copies an exchange": round(copies / exchanges, 3),
        "MB copied an exchange": round(nbytes / exchanges / 1e6, 3),
        "exchanges": float(exchanges),
    }


def accuracies(alone: float, joined: float) -> Figures:
    """Return both accuracies in percent."""
    return {"accuracy alone %": round(100 * alone, 2), "accuracy joined %": round(100 * joined, 2)}
