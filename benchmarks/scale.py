"""Measure what a message costs the hub, from ten live devices to ten thousand.

Run as `python -m benchmarks.scale`. First the core runs alone, without sockets, arrays or a
journal. Every device joins, fetches and then exchanges in turn under the default policy, with pings
in between. Figures are processor times per event. A push that makes a version, and so answers all
waiting devices, counts among the pushes. It also has its own figure, the flush. Then a real hub
serves up to two thousand connections. The exit code is 1 if the core misses a bound.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.hub_bench import HubBench
from benchmarks.hub_process import serve_probed_hub
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync.core.hub.effects import Assign, Fold, SendToDevice
from edgeasync.core.hub.events import Folded, HubEvent, HubReceived, PushArrived, Ticked
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import HubCoreSettings, Limits
from edgeasync.host.host_info import prepare_for_service
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Ping, Push, Welcome

LINEAGE = "00c0ffee00c0ffee"
LENGTH = 1000
"""Values of the model: 4 KB."""

SPEC = ParameterSpec((Parameter("weights", (LENGTH,)),))
PERIOD_S = 1.0
"""Time between two exchanges of a device."""

PUSH_US_MAX = 30.0
GROWTH_MAX = 1.3
SLOWEST_MS_MAX = 15.0

DEVICES = {
    Form.FULL: (10, 20, 100, 1000, 5000, 10_000),
    Form.SHORT: (20, 1000, 10_000),
    Form.QUICK: (10, 20),
}
ROUNDS = {Form.FULL: 20, Form.SHORT: 8, Form.QUICK: 3}
EVENTS_MIN = 4000


Costs = dict[str, tuple[float, float]]
"""Kind of event -> its mean and maximum, in microseconds."""


class Bench:
    """A core with members, and the processor time of each of its events, by kind."""

    def __init__(self, devices: int) -> None:
        self.core = HubCore(
            spec=SPEC,
            training={},
            policy=Policy(),
            settings=HubCoreSettings(limits=Limits(devices_max=devices + 1)),
            version=ModelVersion(LINEAGE, 0),
            make_session=(number.to_bytes(16, "big") for number in itertools.count(1)).__next__,
            now_s=0.0,
        )
        self.now_s = 0.0
        self.times_s: dict[str, list[float]] = {}
        self._handles = itertools.count(1)
        self._random = Random(1)
        self._sessions: list[bytes] = []
        self._bases: dict[bytes, ModelVersion] = {}
        for number in range(devices):
            self._join(number)

    def give(self, kind: str, event: HubEvent) -> None:
        """Pass an event to the core and record its time."""
        begun_s = time.thread_time()
        effects = self.core.handle(event, self.now_s)
        spent_s = time.thread_time() - begun_s
        self.times_s.setdefault(kind, []).append(spent_s)
        for effect in effects:
            if isinstance(effect, Assign):
                self._bases[effect.peer] = effect.version
            elif isinstance(effect, SendToDevice) and isinstance(effect.message, Welcome):
                self._sessions.append(effect.message.session)
            elif isinstance(effect, Fold):
                self.times_s.setdefault("flush", []).append(spent_s)
                if effect.measure:
                    self.give("folded", Folded(effect.number, 1.0))

    def _join(self, number: int) -> None:
        peer = number.to_bytes(4, "big")
        hello = Hello(f"device-{number}", number.to_bytes(16, "big"), 1)
        self.give("join", HubReceived(peer, hello))
        self.give("fetch", HubReceived(peer, Fetch(self._sessions[number])))

    def exchange(self, number: int, sequence: int) -> None:
        """Let a device ping and push its update."""
        peer, session = number.to_bytes(4, "big"), self._sessions[number]
        self.give("ping", HubReceived(peer, Ping(session, self.now_s, 5)))
        loss = self._random.uniform(0.4, 0.6)
        push = Push(session, sequence, self._bases[peer], 8, 256, loss, 0.25, 0.01, "identity", 0, 4000, 0)
        norm = self._random.uniform(0.9, 1.1)
        self.give("push", PushArrived(peer, push, next(self._handles), norm, can_answer=True))
        if self.core.next_deadline_s() <= self.now_s:
            self.give("tick", Ticked())


def measure(devices: int, rounds: int) -> Costs:
    """Let every device exchange several times, in turn."""
    bench = Bench(devices)
    rounds = max(rounds, EVENTS_MIN // devices)
    for sequence in range(1, rounds + 1):
        for number in range(devices):
            bench.now_s += PERIOD_S / devices
            bench.exchange(number, sequence)
        if sequence == 1:
            bench.times_s = {kind: times for kind, times in bench.times_s.items() if kind in ("join", "fetch")}
    bench.core.check()
    return {kind: (1e6 * statistics.fmean(times), 1e6 * max(times)) for kind, times in bench.times_s.items()}


def add(results: Results, name: str, costs: Costs) -> None:
    """Add a fleet's row to both tables."""
    for kind, (usual, slowest) in costs.items():
        results.add("the core alone, mean", name, {f"{kind}, us": usual})
        results.add("the core alone, slowest", name, {f"{kind}, ms": slowest / 1e3})


PINGS_PER_S = 2000.0
"""Pings of all devices together, at every fleet size, so that their costs are comparable."""

BEYOND_S = 3.0
"""How much longer devices push than the measurement.

They must not leave before the final question to the hub, which may be busy.
"""

PUSHING_PROCESSES = 4
SERVE = partial(serve_probed_hub, policy=Policy(), time_events=True)


@dataclass(frozen=True)
class Sockets:
    """How many connections, and the pause before and the length of the measurement."""

    connections: tuple[int, ...]
    settle_s: float
    seconds: float


SOCKETS = {
    Form.FULL: Sockets((20, 200, 2000), 2.0, 15.0),
    Form.SHORT: Sockets((20, 200, 2000), 1.0, 3.0),
    Form.QUICK: Sockets((20,), 0.1, 0.5),
}


def measure_pings(connections: int, effort: Sockets, bench: HubBench) -> dict[str, float]:
    """Let devices join and then only ping; return the table's columns."""
    before, begun_s = bench.hub.ask(), time.monotonic()
    bench.join(0, connections, heartbeat_s=connections / PINGS_PER_S)
    joined_s, joined = time.monotonic() - begun_s, bench.hub.ask()
    time.sleep(effort.settle_s)
    cpu_s, looked, columns = bench.look(effort.seconds, connections)
    return {
        "all joined, s": joined_s,
        "hub CPU a join, us": 1e6 * (joined.cpu_s - before.cpu_s) / connections,
        "hub CPU a ping, us": 1e6 * cpu_s / max(1, looked.pings),
        "pings per second": looked.pings / effort.seconds,
        "slowest event, ms": looked.slowest_event_ms,
        **columns,
    }


def measure_pushes(connections: int, effort: Sockets, bench: HubBench) -> dict[str, float]:
    """Let devices join and push whenever they are answered; return the table's columns."""
    devices = bench.exchange(connections, PUSHING_PROCESSES, effort.settle_s, effort.seconds + BEYOND_S)
    time.sleep(effort.settle_s)
    cpu_s, looked, columns = bench.look(effort.seconds, connections)
    for child in devices:
        child.hear()
    return {
        "hub CPU a push, us": 1e6 * cpu_s / max(1, looked.pushes),
        "pushes per second": looked.pushes / effort.seconds,
        "slowest event, ms": looked.slowest_event_ms,
        **columns,
    }


def measure_sockets(form: Form, results: Results) -> None:
    """Measure growing numbers of connections, with new hubs for pings and for pushes."""
    effort = SOCKETS[form]
    pushes: dict[int, float] = {}
    for connections in effort.connections:
        name = f"{connections:,} connections"
        show_progress(f"{name}: {effort.seconds:g} s of pings, {effort.seconds:g} s of pushes")
        for title, measure in (
            ("joins and pings, real sockets", measure_pings),
            ("pushes of 4 KB, real sockets", measure_pushes),
        ):
            with tempfile.TemporaryDirectory() as folder, HubBench(LENGTH, folder, SERVE) as bench:
                columns = measure(connections, effort, bench)
            results.add(title, name, columns)
        pushes[connections] = columns["hub CPU a push, us"]
    fewest, most = min(pushes), max(pushes)
    ratio = pushes[fewest] / pushes[most]
    results.ratio(f"real sockets: hub CPU a push, {fewest} connections over {most:,}", ratio)


@benchmark("What a message costs the hub as the fleet grows.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure growing fleets, in the core alone and through real sockets."""
    prepare_for_service()
    found = {}
    for devices in DEVICES[arguments.form]:
        show_progress(f"{devices:,} devices in the core alone")
        found[devices] = measure(devices, ROUNDS[arguments.form])
        add(results, f"{devices:,} devices", found[devices])
    most = max(found)
    (few_us, _), (many_us, _) = (found[devices]["push"] for devices in (20, most))
    results.bound("push at 20 devices, us", few_us, PUSH_US_MAX)
    results.bound(f"push at {most:,} over 20 devices", many_us / few_us, GROWTH_MAX)
    slowest_us = max(slowest for _, slowest in found[most].values())
    results.bound(f"slowest event at {most:,}, ms", slowest_us / 1e3, SLOWEST_MS_MAX)
    measure_sockets(arguments.form, results)


if __name__ == "__main__":
    main()
