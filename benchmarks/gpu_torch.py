"""GPU cases of torch: a joined module, and one that an agent trains."""

import tempfile
import time
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu_devices import (
    OVERLAP_STEPS,
    START_S,
    TRAINED,
    Case,
    Figures,
    accuracies,
    copied,
    counted_links,
    digits,
    fit,
    hub_process,
    network,
    open_hub,
    summed_up,
    torch_model,
    warm_up,
)
from edgeasync import Agent, Dataset, join
from edgeasync.torch import load, model
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import take_local_steps

BATCH = 64
LEARNING_RATE = 0.05
SETTLE_S = 0.5
"""How long an exchange in flight may take before the loop runs alone."""


class Loop:
    """A training loop whose steps train on a batch, do extra work and read the loss."""

    def __init__(self, case: Case, work: "Work") -> None:
        kind = case.name
        self.case, self._work = case, work
        self.module = network(case.effort.width).to(case.device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self._forward: Any = torch.compile(self.module) if kind == "compile" else self.module
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind)
        self._cast: Any = nullcontext() if dtype is None else torch.autocast(case.device, dtype)
        self._scaler = torch.amp.GradScaler(case.device) if kind == "float16" else None
        (x, y), _ = digits()
        self._x, self._y = torch.from_numpy(x).to(case.device), torch.from_numpy(y).to(case.device)
        self._order = np.random.default_rng(0)

    def step(self, *, looks: bool = True) -> None:
        """Take a step; without reading the loss, it does not wait for the GPU."""
        x, y = self.batch()
        self.optimizer.zero_grad()
        with self._cast:
            loss = nn.functional.cross_entropy(self._forward(x), y)
        if self._scaler is None:
            loss.backward()
            self._work.do()
            self.optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            self._work.do()
            self._scaler.step(self.optimizer)
            self._scaler.update()
        if looks:
            loss.item()

    def batch(self) -> tuple[Any, Any]:
        """Return the next batch."""
        start = int(self._order.integers(len(self._x) - BATCH))
        return self._x[start : start + BATCH], self._y[start : start + BATCH]

    def take(self, steps: int) -> float:
        """Run some steps; return their seconds."""
        synchronize(self.case)
        begun_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.case)
        return time.perf_counter() - begun_s

    def accuracy(self) -> float:
        """Return the accuracy on held-out digits."""
        return accuracy(self.module, self.case)


class Plain(Loop):
    """The loop that a trainer is compared with; it copies each batch to the device."""

    def batch(self) -> tuple[Any, Any]:
        """Return the next batch."""
        rows, (data, _) = self._order.permutation(TRAINED)[:BATCH], digits()
        x, y = (torch.from_numpy(array[rows]).to(self.case.device) for array in data)
        return x, y


class Work:
    """Matrix products on the device that lengthen a step."""

    def __init__(self, case: Case) -> None:
        size = 2048 if case.on_gpu else 64
        self._left = torch.randn(size, size, device=case.device)
        self._out = torch.empty_like(self._left)
        self._count = 0

    def do(self) -> None:
        """Start the products; a GPU computes them later."""
        for _ in range(self._count):
            torch.mm(self._left, self._left, out=self._out)

    def draw_out(self, count: int) -> None:
        """Set how many products a step computes."""
        self._count = count


def prepare(case: Case) -> None:
    """Set up torch; a CPU that replaces a GPU leaves the other cores to the hub."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if not case.on_gpu:
        torch.set_num_threads(1)


def synchronize(case: Case) -> None:
    """Wait for the GPU."""
    if case.on_gpu:
        torch.cuda.synchronize()


def allocated(case: Case) -> int:
    """Return the bytes of tensors on the GPU."""
    return int(torch.cuda.memory_allocated()) if case.on_gpu else 0


def accuracy(module: nn.Module, case: Case) -> float:
    """Return a module's accuracy on held-out digits."""
    _, (x, y) = digits()
    with torch.no_grad():
        found = module(torch.from_numpy(x).to(case.device)).argmax(1).cpu().numpy()
    return float((found == y).mean())


def joined(case: Case, overlap_steps: int = OVERLAP_STEPS) -> Figures:
    """Measure a loop that alternates between running alone and running joined.

    Both take the same steps on the same data.
    """
    prepare(case)
    effort = case.effort
    with counted_links(case) as traffic, hub_process(torch_model, effort.width, overlap_steps) as address:
        work = Work(case)
        alone, other = Loop(case, work), Loop(case, work)
        other.take(fit(alone.take, work.draw_out, effort.step_s))
        before = allocated(case)
        turns = []
        session = join(address(), other.module, other.optimizer, name="loop", own_start=True, timeout_s=START_S)
        with session:
            for _ in warm_up(session):
                for loop in (alone, other):
                    loop.take(16)
            begun, before_copies = session.exchanges, traffic.ended
            for _ in range(effort.rounds):
                time.sleep(SETTLE_S * case.on_gpu)
                alone_s, had = alone.take(effort.steps), session.exchanges
                joined_s = other.take(effort.steps)
                turns.append((alone_s, joined_s, effort.steps, session.exchanges - had))
            extra = allocated(case) - before
            figures = copied(before_copies, traffic.ended, session.exchanges - begun) | summed_up(turns)
            figures["MB on the GPU beside the module's"] = round(extra / 1e6, 3)
        return figures | accuracies(alone.accuracy(), other.accuracy())


PROBED = 96
"""Steps under the profiler."""


def profiled(case: Case) -> Figures:
    """Profile a joined loop that does not read its losses, and count its waits."""
    prepare(case)
    with hub_process(torch_model, case.effort.width, OVERLAP_STEPS) as address:
        loop = Loop(case, Work(case))
        with join(address(), loop.module, loop.optimizer, name="loop", timeout_s=START_S) as session:
            for _ in warm_up(session):
                loop.take(16)
            return _looked_at(loop, session)


def _looked_at(loop: Loop, session: Any) -> Figures:
    on_gpu, begun = loop.case.on_gpu, session.exchanges
    kinds = torch.profiler.ProfilerActivity
    if on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    with (
        warnings.catch_warnings(record=True) as told,
        torch.profiler.profile(activities=[kinds.CPU] + [kinds.CUDA] * on_gpu) as seen,
    ):
        warnings.simplefilter("always")
        for _ in range(PROBED):
            loop.step(looks=False)
            time.sleep(loop.case.effort.step_s)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        synchronize(loop.case)
    exchanges = max(1, session.exchanges - begun)
    names = [event.name for event in seen.events()]
    return {
        "DtoH seen an exchange": round(sum("Memcpy DtoH" in name for name in names) / exchanges, 2),
        "HtoD seen an exchange": round(sum("Memcpy HtoD" in name for name in names) / exchanges, 2),
        "waits seen an exchange": round(sum("synchroniz" in str(each.message) for each in told) / exchanges, 2),
        "exchanges": float(exchanges),
    }


def waiting(case: Case) -> Figures:
    """Measure a loop that waits for each exchange, as it does without overlap."""
    return joined(case, overlap_steps=0)


def agent(case: Case) -> Figures:
    """Compare a trainer's steps with a plain loop's, then train an agent to the end."""
    prepare(case)
    figures = _trained(case)
    effort, (data, _) = case.effort, digits()
    small = 64
    with tempfile.TemporaryDirectory() as run, open_hub(model(network(small)), run, 0) as hub:
        given = model(network(small), device=case.device)
        with Agent(hub.address, data, model=given, name="gpu", batch_size=BATCH, passes=effort.passes) as running:
            running.wait(4 * START_S)
        trained = load(network(small).to(case.device), hub.snapshot())
    alone = network(small).to(case.device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
    x, y = (torch.from_numpy(array).to(case.device) for array in data)
    order = np.random.default_rng(0)
    for _ in range(effort.passes):
        for rows in np.array_split(order.permutation(len(x)), len(x) // BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(x[rows]), y[rows]).backward()
            optimizer.step()
    return figures | accuracies(accuracy(alone, case), accuracy(trained, case))


def _trained(case: Case) -> Figures:
    """Measure an agent's trainer: its steps, and its copies per assignment of 16 steps."""
    effort, ((x, y), _) = case.effort, digits()
    width, assignments = effort.width, max(2, effort.steps // 16)
    with counted_links(case) as traffic:
        work = Work(case)
        plain = Plain(case, work)
        fit(plain.take, work.draw_out, effort.step_s)

        def loss(found: Any, targets: Any) -> Any:
            work.do()
            return nn.functional.cross_entropy(found, targets)

        prepared = model(network(width), loss, device=case.device).prepare(LocalTraining(batch_size=BATCH))
        synchronize(case)
        before = allocated(case)
        trainer: Any = prepared.make_trainer(Dataset.of(x, y), 0, 1)
        if not case.on_gpu:
            trainer._held.shares_memory = False  # noqa: SLF001 - as on a GPU
        vector = prepared.initial.copy()
        own = allocated(case) - before
        turns = []
        for number in range(assignments):
            begun_s = time.perf_counter()
            trainer.begin(vector)
            take_local_steps(
                trainer, 16, should_stop=lambda: False, on_step=lambda: None, wait=lambda _: None
            )  # fmt: skip
            joined_s = time.perf_counter() - begun_s
            alone_s = plain.take(16)
            if number:  # the first one allocates
                turns.append((alone_s, joined_s, 16, 1))
        extra = allocated(case) - before - own
        return {
            **summed_up(turns),
            **copied((0, 0), (traffic.copies, traffic.bytes), assignments),
            "MB on the GPU beside the module's": round(extra / 1e6, 3),
        }
