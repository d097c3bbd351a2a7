"""What the hub's policies cost: folding an update with the default policy against one plain `w += s * g`.

Run as `python -m benchmarks.fold`. Both run on one thread, in turns. The plain sum is numpy's, in place and in
slices that stay in the cache: no rule can do less.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report import Form, Results, make_parser, show_progress, show_results
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.core.hub.events import HubReceived, PushArrived
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness
from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.codecs import VectorSource
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Push

LENGTHS = {"1M": 1_000_000, "10M": 10_000_000}
TINY_LENGTHS = {"0.1M": 100_000}
GATHERED = 12
"""Updates in a version of the default: a quorum of twenty devices."""

DEVICES = 20
TARGET = 0.33


@dataclass(frozen=True)
class Effort:
    """What to measure: models by name, how often each is folded, and how many updates the core decides about."""

    lengths: Mapping[str, int]
    rounds: int
    decisions: int


EFFORTS = {
    Form.FULL: Effort(LENGTHS, 60, 20_000),
    Form.SHORT: Effort(LENGTHS, 15, 4_000),
    Form.QUICK: Effort(TINY_LENGTHS, 1, 200),
}


def measure(length: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of every round: the plain sum, folds, per update, and the norm of an update."""
    rng = np.random.Generator(np.random.PCG64(1))
    policy = Policy()
    spec = ParameterSpec((Parameter("w", (length,)),))
    model = HubModel(spec, np.zeros(length, np.float32), 0, policy)
    deltas = [rng.normal(0.0, 1e-4, length).astype(np.float32) for _ in range(GATHERED)]
    updates = [VectorSource(delta) for delta in deltas]
    plain, scratch = np.zeros(length, np.float32), np.empty(CHUNK, np.float32)

    def plain_sum() -> None:
        for start in range(0, length, CHUNK):
            part = slice(start, min(start + CHUNK, length))
            out = scratch[: part.stop - part.start]
            np.multiply(deltas[0][part], np.float32(0.5), out=out)
            np.add(plain[part], out, out=plain[part])

    def fold(count: int) -> None:
        number = model.current.number + 1
        weights = (1.0 / count,) * count
        plan = plan_chain(policy.optimizer, Conditions(1.0, number))
        taken = Fold(number, tuple(range(count)), weights, plan, measure=count > 1)
        model.advance(model.fold(taken, updates[:count])[0])

    cases: dict[str, tuple[Callable[[], object], int]] = {
        "w += s g": (plain_sum, 1),
        "fold of 1": (lambda: fold(1), 1),
        f"fold of {GATHERED}, per update": (lambda: fold(GATHERED), GATHERED),
        "norm": (lambda: model.norm(updates[0]), 1),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 2):
        for name, (work, updates_done) in cases.items():
            started = time.perf_counter()
            work()
            if number >= 2:  # the first two touch fresh memory
                times[name].append((time.perf_counter() - started) * 1e3 / updates_done)
    return times


def measure_decision(updates: int) -> float:
    """Return the microseconds that the core takes to decide about an update and answer it, among live devices."""
    spec = ParameterSpec((Parameter("w", (4,)),))
    sessions = iter(range(1, DEVICES + 1))
    core = HubCore(
        spec=spec,
        training={},
        policy=Policy(),
        settings=HubCoreSettings(
            codec=FLOAT32, liveness=Liveness(heartbeat_s=3000.0, lease_s=86_400.0), limits=Limits()
        ),
        version=ModelVersion("0" * 16, 0),
        make_session=lambda: next(sessions).to_bytes(16, "big"),
        now_s=0.0,
    )
    names = [f"device-{number}" for number in range(DEVICES)]
    for number, name in enumerate(names):
        core.handle(HubReceived(name.encode(), Hello(name, number.to_bytes(16, "big"), 1)), 0.0)
        core.handle(HubReceived(name.encode(), Fetch(core.members.members[name].session)), 0.0)
    started = time.perf_counter()
    for count in range(updates):
        name, seq = names[count % DEVICES], count // DEVICES + 1
        member = core.members.members[name]
        base = member.assigned or ModelVersion("0" * 16, core.version)
        push = Push(member.session, seq, base, 8, 256, 0.5, 0.01, 0.01, "identity", 0, 16)
        core.handle(PushArrived(name.encode(), push, count, 1.0), 0.1 * count)
    return (time.perf_counter() - started) * 1e6 / updates


def main() -> None:
    """Measure and show."""
    arguments = make_parser(__doc__ or "").parse_args()
    effort = EFFORTS[arguments.form]
    results = Results()
    for name, length in effort.lengths.items():
        show_progress(f"{name} parameters")
        times = measure(length, effort.rounds)
        medians: dict[str, float] = {case: statistics.median(found) for case, found in times.items()}
        results.add("ms", name, medians)
        plain: Any = times["w += s g"]
        for case in ("fold of 1", f"fold of {GATHERED}, per update"):
            ratio = statistics.median(one / other for one, other in zip(plain, times[case], strict=True))
            results.ratios[f"{name}: w += s g over {case}"] = ratio
            results.targets[f"{name}: w += s g over {case}"] = TARGET
    results.add("us", "decision of the core", {"per update": measure_decision(effort.decisions)})
    show_results(results, arguments)


if __name__ == "__main__":
    main()
