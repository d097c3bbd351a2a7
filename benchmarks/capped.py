"""How much a device is held up by one beside it whose link carries 16 KiB a second.

Run as `python -m benchmarks.capped`. Simulated devices train a network on the handwritten digits in virtual time,
alone, beside an equal one, and beside a capped one. Then real processes do, where an agent keeps the cap itself.
The exchanges beside the capped one are held against those alone, which are the most of the three.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.pool import measure_in_processes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.simulated import split_digits, start_device
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.data.partition import iid
from edgeasync.net.status import fetch_status
from edgeasync.policies.policy import Policy
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile
from tests.support.programs.processes import PATIENCE_S, Commands, status_when

FREE = LinkProfile(6.25e6, 6.25e6, 0.005)
CAP_BYTES_PER_S = 16 << 10
CAPPED = LinkProfile(CAP_BYTES_PER_S, CAP_BYTES_PER_S, 0.005)
FLEETS: dict[str, tuple[LinkProfile, ...]] = {
    "alone": (FREE,),
    "beside an equal one": (FREE, FREE),
    "beside a capped one": (FREE, CAPPED),
    "beside two capped ones": (FREE, CAPPED, CAPPED),
    "two beside a capped one": (FREE, FREE, CAPPED),
}
HELD_UP = ("beside a capped one", "beside two capped ones", "two beside a capped one")

KEPT_MIN = 0.8
"""The least share of its exchanges alone that a device keeps beside a capped one."""

STEP_S = 0.05
LEARNING_RATE = 0.2


@dataclass(frozen=True)
class Effort:
    """Seeds, virtual seconds and hidden units in the simulator; real seconds, 0 for none."""

    seeds: int
    virtual_s: float
    hidden: int
    real_s: float


EFFORTS = {
    Form.FULL: Effort(15, 60.0, 256, 60.0),
    Form.SHORT: Effort(2, 60.0, 256, 30.0),
    Form.QUICK: Effort(1, 10.0, 64, 0.0),
}


@dataclass(frozen=True)
class Case:
    """One run in virtual time."""

    links: tuple[LinkProfile, ...]
    seed: int
    seconds: float
    hidden: int


@dataclass(frozen=True)
class Seen:
    """The exchanges of the first device, the period that the status shows at the end, and the model's versions."""

    exchanges: int
    shown_s: float
    versions: int


def simulate(case: Case) -> Seen:
    """Train a fleet of two or three in virtual time."""
    model = MlpModel(inputs=64, hidden=(case.hidden,), classes=10)
    training, _ = split_digits()
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=model.spec,
        initial=model.initial(case.seed),
        policy=Policy(),
        settings=HubCoreSettings(),
        seed=case.seed,
    )
    hub.start()
    parts = iid(training, len(case.links), case.seed)
    for number, (link, part) in enumerate(zip(case.links, parts, strict=True)):
        start_device(
            clock,
            hub,
            model,
            number,
            part,
            learning_rate=LEARNING_RATE,
            step_s=STEP_S,
            link=link,
            seed=case.seed,
        )
    clock.run(lambda: False, case.seconds)
    status = hub.core.status(clock.now_s)
    exchanges = hub.core.members.members["device-1"].measurements.updates
    return Seen(exchanges, status["cadence"]["period_s"], hub.core.version)


def measure_simulated(effort: Effort, results: Results) -> None:
    """Compare the fleets over the seeds, in virtual time."""
    seeds = range(1, effort.seeds + 1)
    cases = [Case(links, seed, effort.virtual_s, effort.hidden) for links in FLEETS.values() for seed in seeds]
    found = iter(measure_in_processes(simulate, cases, "in virtual time"))
    seen = {name: [next(found) for _ in seeds] for name in FLEETS}
    for name, runs in seen.items():
        kept_s = effort.virtual_s / statistics.fmean(one.exchanges for one in runs)
        columns = {
            "exchanges": statistics.fmean(one.exchanges for one in runs),
            "versions": statistics.fmean(one.versions for one in runs),
            "period kept, s": kept_s,
            "period shown, s": statistics.fmean(one.shown_s for one in runs),
        }
        results.add("in virtual time, the first device", name, columns)
    for name in HELD_UP:
        pairs = zip(seen[name], seen["alone"], strict=True)
        add_ratio(
            results,
            f"exchanges {name}, least of {effort.seeds} seeds",
            [b.exchanges / a.exchanges for b, a in pairs],
        )


def measure_real(effort: Effort, results: Results) -> None:
    """Compare one device alone with the same beside a capped one, as real processes."""
    exchanges = {}
    for name, flags in (
        ("alone", ()),
        ("beside a capped one", ("--bandwidth-bytes-per-s-max", str(CAP_BYTES_PER_S))),
    ):
        show_progress(f"real processes: {name}")
        with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
            exchanges[name] = run_processes(commands, effort.real_s, flags)
            results.add("real processes", name, {"exchanges": exchanges[name], "seconds": effort.real_s})
    add_ratio(
        results, "real exchanges beside a capped one", [exchanges["beside a capped one"] / exchanges["alone"]]
    )


def run_processes(commands: Commands, seconds: float, capped: tuple[str, ...]) -> int:
    """Let one agent train, with a second one if there are flags for it; return the exchanges of the first."""
    training, _ = split_digits()
    data = Path(commands.folder) / "digits.npz"
    np.savez(data, x=training.x, y=training.y)
    settings = commands.settings(model='kind = "mlp"\ninputs = 64\nhidden = [1024]\nclasses = 10', more="")
    _, address = commands.hub(settings)
    if capped:
        commands.agent(address, "capped", *capped, data=data, step_s=STEP_S)
        status_when(address, lambda status: bool(status["devices"]))
    commands.agent(address, "free", data=data, step_s=STEP_S)
    status_when(address, lambda status: applied(status) > 0)
    before = applied(fetch_status(address, PATIENCE_S))
    time.sleep(seconds)
    return applied(fetch_status(address, PATIENCE_S)) - before


def applied(status: dict[str, object]) -> int:
    """Return how many updates of the device that is not capped are in the model."""
    devices = status["devices"]
    assert isinstance(devices, list)
    return sum(device["updates_applied"] for device in devices if device["id"] == "free")


def add_ratio(results: Results, name: str, kept: list[float]) -> None:
    """Add the least of some shares, and what it must reach."""
    results.ratios[name] = round(min(kept), 3)
    results.targets[name] = KEPT_MIN


def parse() -> argparse.Namespace:
    """Return the arguments."""
    return make_parser("How much one device with a capped link holds up the others.").parse_args()


def main() -> None:
    """Measure in virtual time, then with real processes."""
    arguments = parse()
    effort = EFFORTS[arguments.form]
    results = Results()
    measure_simulated(effort, results)
    if effort.real_s:
        measure_real(effort, results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
