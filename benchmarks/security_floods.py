"""Measure how floods affect honest devices: twenty of them, one flooder at a time.

Run as `python -m benchmarks.security_floods`. The hub has keys. The devices exchange once a second.
Flooders are strangers from one address, or have one enrolled key, and use at most half a core. Each
flood lasts a minute. The devices must keep 80 % of their exchanges, and no device may be lost. The
bounds also cover the lag of the hub's loop and its memory, which must stay below what `edgeasync
hub --check` prints. Memory and open files must return to normal within a minute.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import uvloop

from benchmarks.agent_process import Waits
from benchmarks.hub_process import ADDRESS, Looked, allow_many_files, make_hub, make_spec, run_probed
from benchmarks.processes import Child, Children, resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.security_floods_flooders import ENROLLED, FLOODS, LENGTH, NAME, Target, run_flood
from edgeasync.config import FilePath
from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.settings import Limits, Liveness
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.keys import HubKeys, KeyPair
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from tests.support.parts.agents import agent_parts

POLICY = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=1))
DEVICES_MAX = 1_000
STEP_S = 0.98
"""One exchange per second, plus some time for the exchange."""


@dataclass(frozen=True)
class Seen:
    """What the hub's process has measured since the last question."""

    lag_p99_ms: float
    lag_max_ms: float
    lost: int
    live: int
    denied: dict[str, int]


def run_hub(run: str, keys: str, pipe: "Connection[Any, None]") -> None:
    """Run a hub with keys; send its memory bound and address, then measurements on request."""
    allow_many_files()
    lost: Counter[str] = Counter()

    def note(report: HubReport) -> None:
        if report.event == "listening":
            pipe.send(most_bytes)
        lost[report.device_id] += report.event == "lost" and report.device_id.startswith("honest")

    settings = RunSettings(
        hub=HubSection(bind=ADDRESS, keys=FilePath(keys)),
        policy=POLICY,
        limits=Limits(devices_max=DEVICES_MAX),
        liveness=Liveness(heartbeat_s=2.0, lease_s=6.0),
    )
    hub = make_hub(LENGTH, run, pipe, settings, note)
    most_bytes = sum(part.nbytes for part in hub.most_memory())

    def describe(looked: Looked) -> Seen:
        members = hub.core.members.members
        live = sum(member.live and name.startswith("honest") for name, member in members.items())
        seen = Seen(looked.lag_p99_ms, looked.lag_max_ms, lost.total(), live, hub.describe()["denied"])
        lost.clear()
        return seen

    run_probed(hub.run, pipe, describe)


def run_devices(folder: str, names: tuple[str, ...], pipe: "Connection[Any, Any]") -> None:
    """Run agents with keys; report when all have an answer, then the answers on request."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        answered: Counter[str] = Counter()
        everybody = asyncio.Event()

        def note(name: str, report: DeviceReport) -> None:
            answered[name] += report.event == "answered"
            if len(+answered) == len(names) and not everybody.is_set():
                everybody.set()
                pipe.send(None)

        def answer() -> None:
            pipe.recv()
            pipe.send(answered.total())

        loop.add_reader(pipe.fileno(), answer)
        spec = make_spec(LENGTH)
        agents = [
            AgentRuntime(
                *agent_parts(
                    lambda _: Waits(spec, STEP_S, 0.001),
                    identity=DeviceIdentity(name, f"{number + 1:032x}", 1),
                    keys=DeviceKeys(Path(folder) / name),
                ),
                on_report=lambda report, name=name: note(name, report),  # type: ignore[misc]
            )
            for number, name in enumerate(names)
        ]
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
                await asyncio.sleep(1.0 / len(agents))  # so that exchanges are spread over the second

    uvloop.run(serve())


DEVICES = 20
KEPT_MIN = 0.8
LAG_BOUND_MS = 50.0
BACK_S = 60.0
BACK_BYTES = 32 << 20
"""Memory that the hub may keep after a flood."""

BACK_FILES = 4
LOOK_S = 0.05
BEGIN_S = 1.0
"""Time after which a flood is in progress."""


@dataclass(frozen=True)
class Effort:
    """How long to measure without and with each flood, and which floods."""

    seconds: float
    floods: tuple[str, ...]


EFFORTS = {
    Form.FULL: Effort(60.0, tuple(FLOODS)),
    Form.SHORT: Effort(8.0, tuple(FLOODS)),
    Form.QUICK: Effort(1.0, ("1,000 connections", "endless frames", "64 members hold places")),
}


class Bench(Children):
    """A hub, its honest devices, and sometimes a flooder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("benchmarks.security_floods", "benchmarks.security_floods_flooders")
        self._folder = folder

    def __enter__(self) -> Self:
        keys = HubKeys.init(self._folder / "keys")
        pair = KeyPair.make()
        keys.allow(NAME, "device", pair.public)
        names = tuple(f"honest-{number}" for number in range(DEVICES))
        for name in names:
            keys.allow(name, "device", DeviceKeys(self._folder / name).own().public)
        self._hub = self.start(run_hub, str(self._folder / "run"), str(keys.folder))
        self.most_bytes, self.address = self._hub.hear(), self._hub.hear()
        for name in names:
            DeviceKeys(self._folder / name).know(keys.pair().public, (self.address,), name)
        self._target = Target(self.address, keys.pair().public, pair.secret)
        self._devices = self.start(run_devices, str(self._folder), names)
        self._devices.hear()
        return self

    def watch(self, seconds: float) -> tuple[float, int, Seen]:
        """Return exchanges per second, peak memory, and the hub's measurements meanwhile."""
        self._hub.ask()
        before, begin_s = self._devices.ask(), time.monotonic()
        most = 0
        while time.monotonic() < begin_s + seconds:
            most = max(most, self.memory())
            time.sleep(LOOK_S)
        rate = (self._devices.ask() - before) / (time.monotonic() - begin_s)
        return rate, most, self._hub.ask()

    def flood(self, name: str) -> Child:
        """Start a flood; kill it to end it."""
        flooder = self.start(run_flood, name, self._target)
        flooder.hear()
        return flooder

    def memory(self) -> int:
        """Return the hub's memory in bytes."""
        return resident_bytes(self._hub.process.pid)

    def files(self) -> int:
        """Return the hub's number of open descriptors."""
        return len(list(Path(f"/proc/{self._hub.process.pid}/fd").iterdir()))

    def back_s(self, nbytes: int, files: int) -> float:
        """Return the time until memory and files are back, a little over a minute at most."""
        begin_s = time.monotonic()
        while self.memory() > nbytes + BACK_BYTES or self.files() > files + BACK_FILES:
            if time.monotonic() > begin_s + BACK_S + 5.0:
                break
            time.sleep(LOOK_S)
        return time.monotonic() - begin_s


def measure(effort: Effort, results: Results) -> None:
    """Measure without a flood, then each flood."""
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        show_progress(f"quiet: {effort.seconds:g} s")
        usual, most, seen = bench.watch(effort.seconds)
        results.add("floods", "quiet", _columns(usual, usual, seen, most))
        for name in effort.floods:
            who = "an enrolled key" if name in ENROLLED else "a stranger"
            show_progress(f"{name}, by {who}: {effort.seconds:g} s")
            nbytes, files = bench.memory(), bench.files()
            before = sum(seen.denied.values())
            flooder = bench.flood(name)
            time.sleep(min(BEGIN_S, effort.seconds))
            rate, most, seen = bench.watch(effort.seconds)
            flooder.kill()
            back_s = bench.back_s(nbytes, files)
            denied = sum(seen.denied.values()) - before
            rest = {"back after, s": back_s, "denied": denied}
            results.add("floods", name, _columns(rate, usual, seen, most) | rest)
            results.ratio(f"{name}: exchanges kept", rate / usual, KEPT_MIN)
            results.ratio(f"{name}: devices that were not lost", 1.0 - seen.lost / DEVICES, 1.0)
            results.bound(f"{name}: loop lag p99", seen.lag_p99_ms, LAG_BOUND_MS)
            results.bound(f"{name}: memory", most, bench.most_bytes)
            results.bound(f"{name}: memory and files back", back_s, BACK_S)
            show_progress(f"  denied so far: {seen.denied}")


def _columns(rate: float, usual: float, seen: Seen, most: int) -> dict[str, float]:
    return {
        "exchanges/s": rate,
        "kept, %": 100.0 * rate / usual,
        "lost": seen.lost,
        "live": seen.live,
        "lag p99, ms": seen.lag_p99_ms,
        "lag max, ms": seen.lag_max_ms,
        "memory, MiB": most / 2**20,
    }


@benchmark("How floods affect twenty honest devices.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure all floods."""
    measure(EFFORTS[arguments.form], results)


if __name__ == "__main__":
    main()
