"""What a message costs the hub, from ten live devices to ten thousand.

Run as `python -m benchmarks.scale`. First the core alone decides: no sockets, no arrays, no journal. Every device
joins, fetches, and then exchanges in turn under the default policy; pings come between. The times are of
processor, per event. The push that makes a version, with the answers of all who waited for it, counts among the
pushes; it has a figure of its own beside them, the flush. Then a real hub with up to two thousand connections does
the same. It ends with exit code 1 if the core misses a bound.
"""

import itertools
import statistics
import time
from dataclasses import dataclass
from random import Random

from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.scale_sockets import measure_sockets
from edgeasync.core.hub.effects import Assign, Fold, SendToDevice
from edgeasync.core.hub.events import Folded, HubEvent, HubReceived, PushArrived, Ticked
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import HubCoreSettings, Limits
from edgeasync.host.host_info import prepare_for_service
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Ping, Push, Welcome

LINEAGE = "00c0ffee00c0ffee"
SPEC = ParameterSpec((Parameter("weights", (1000,)),))
PERIOD_S = 1.0
"""The time from one exchange of a device to its next."""

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


@dataclass(frozen=True)
class Costs:
    """Microseconds of an event of each kind, the usual one and the slowest."""

    usual: dict[str, float]
    slowest: dict[str, float]


class Bench:
    """A core with members, and the processor's time that each of its events took, by kind."""

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
        """Hand an event in, and note what it took."""
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
    """Let every device exchange some times, in turn."""
    bench = Bench(devices)
    rounds = max(rounds, EVENTS_MIN // devices)
    for sequence in range(1, rounds + 1):
        for number in range(devices):
            bench.now_s += PERIOD_S / devices
            bench.exchange(number, sequence)
        if sequence == 1:
            bench.times_s = {kind: times for kind, times in bench.times_s.items() if kind in ("join", "fetch")}
    bench.core.check()
    return Costs(
        {kind: 1e6 * statistics.fmean(times) for kind, times in bench.times_s.items()},
        {kind: 1e6 * max(times) for kind, times in bench.times_s.items()},
    )


def add(results: Results, name: str, costs: Costs) -> None:
    """Add a fleet's row to both tables."""
    usual = {f"{kind}, us": round(microseconds, 1) for kind, microseconds in costs.usual.items()}
    slowest = {f"{kind}, ms": round(microseconds / 1e3, 2) for kind, microseconds in costs.slowest.items()}
    results.add("the core alone, mean", name, usual)
    results.add("the core alone, slowest", name, slowest)


def main() -> None:
    """Measure fleets of growing size, in the core alone and through real sockets."""
    arguments = make_parser("What a message costs the hub as the fleet grows.").parse_args()
    results = Results()
    prepare_for_service()
    found = {}
    for devices in DEVICES[arguments.form]:
        show_progress(f"{devices:,} devices in the core alone")
        found[devices] = measure(devices, ROUNDS[arguments.form])
        add(results, f"{devices:,} devices", found[devices])
    most = max(found)
    results.bound("push at 20 devices, us", found[20].usual["push"], PUSH_US_MAX)
    results.bound(
        f"push at {most:,} over 20 devices", found[most].usual["push"] / found[20].usual["push"], GROWTH_MAX
    )
    results.bound(f"slowest event at {most:,}, ms", max(found[most].slowest.values()) / 1e3, SLOWEST_MS_MAX)
    measure_sockets(arguments.form, results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
