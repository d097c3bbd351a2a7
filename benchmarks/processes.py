"""Processes of a benchmark, which answer through pipes, and tools for any process."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.report import show_progress

PATIENCE_S = 60.0
"""How long a process may take to answer."""


class Child:
    """A process and our end of its pipe; the process receives the other end as last argument."""

    def __init__(
        self, context: ForkServerContext | SpawnContext, target: Callable[..., None], *arguments: object
    ) -> None:
        self.pipe: Connection[Any, Any]
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """Return the next message of the process.

        A process that has failed has printed the reason on standard error.
        """
        if not self.pipe.poll(patience_s):
            raise TimeoutError(f"{self.process.name} does not answer")
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.process.name} has failed") from None

    def ask(self) -> Any:
        """Ask a process for its measurements since the last question."""
        self.pipe.send(None)
        return self.hear()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()


class Children:
    """Processes that start with these modules imported; all are killed on exit.

    Create the folder in which they write before this object, so that it outlives them.
    """

    def __init__(self, *preloaded: str) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()

    def start(self, target: Callable[..., None], *arguments: object) -> Child:
        """Start a process."""
        child = Child(self._context, target, *arguments)
        self._children.append(child)
        return child


def shares(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Divide numbers among processes; return where each share begins and ends."""
    return list(itertools.pairwise(first + (last - first) * part // max(1, count) for part in range(count + 1)))


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many cores busy until the block ends."""
    with ExitStack() as stack:
        for _ in range(count):
            process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
            process.start()
            stack.callback(process.kill)
        yield


def _spin() -> None:
    while True:
        pass


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used, in all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int | None) -> int:
    """Return a process's resident memory, shared pages included."""
    return int(psutil.Process(pid).memory_info().rss)


def peak_resident_bytes(pid: int | None) -> int:
    """Return a process's peak resident memory, shared pages included (Linux only)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(kilobytes)


@dataclass(frozen=True)
class Used:
    """A process's resource use at one moment.

    `written_bytes` counts what it has written to disks since its start.
    """

    resident_bytes: int
    descriptors: int
    threads: int
    written_bytes: int


def used_by(pid: int) -> Used:
    """Measure a process's resource use (Linux only)."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Used(
            int(process.memory_info().rss),
            int(process.num_fds()),
            int(process.num_threads()),
            int(process.io_counters().write_bytes),
        )


Case = TypeVar("Case")
Key = TypeVar("Key")
Outcome = TypeVar("Outcome")


def measure_groups(
    measure: Callable[[Case], Outcome], groups: Mapping[Key, Sequence[Case]], what: str
) -> dict[Key, list[Outcome]]:
    """Measure the cases of all groups on all cores; return the outcomes by group.

    `measure` must be a named function.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__])
    found: dict[Key, list[Outcome]] = {key: [] for key in groups}
    keys = [key for key, cases in groups.items() for _ in cases]
    with ProcessPoolExecutor(mp_context=context, initializer=_begin) as pool:
        outcomes = pool.map(measure, [case for cases in groups.values() for case in cases])
        for number, (key, outcome) in enumerate(zip(keys, outcomes, strict=True), start=1):
            found[key].append(outcome)
            if number % max(1, len(keys) // 10) == 0:
                show_progress(f"{what}: {number} of {len(keys)} runs")
    return found


def _begin() -> None:
    # The matrices are small: threads of numpy's own would only slow the other processes down.
    threadpool_limits(1)
