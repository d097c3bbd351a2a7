"""Simulated runs in processes, one a core."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.report import show_progress

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def measure_in_processes(measure: Callable[[Case], Outcome], cases: Sequence[Case], what: str) -> list[Outcome]:
    """Measure all cases, on all cores; return their outcomes in the same order. `measure` is a named function."""
    outcomes = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__])
    with ProcessPoolExecutor(mp_context=context, initializer=_begin) as pool:
        for outcome in pool.map(measure, cases):
            outcomes.append(outcome)
            if len(outcomes) % max(1, len(cases) // 10) == 0:
                show_progress(f"{what}: {len(outcomes)} of {len(cases)} runs")
    return outcomes


def _begin() -> None:
    # The matrices are small: threads of numpy's own would only slow the other processes down.
    threadpool_limits(1)
