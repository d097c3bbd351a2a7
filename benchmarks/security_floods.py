"""What a flood takes from honest devices: twenty of them exchange once a second beside one flooder at a time.

Run as `python -m benchmarks.security_floods`. The hub has keys. Flooders are strangers from one address, or hold
one enrolled key, and take half a core at most. Each flood lasts a minute. The devices must keep 80 % of their
exchanges, and no device may be lost. The hub's loop must wake in time, its memory stay under what
`edgeasync hub --check` prints, and memory and files come back within a minute.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.children import Child, Children
from benchmarks.processes import resident_bytes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.security_floods_flooders import ENROLLED, FLOODS, NAME, Target, run_flood
from benchmarks.security_floods_processes import Seen, run_devices, run_hub
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import HubKeys, KeyPair

DEVICES = 20
KEPT_MIN = 0.8
LAG_BOUND_MS = 50.0
BACK_S = 60.0
BACK_BYTES = 32 << 20
"""What the hub may keep of a flood."""

BACK_FILES = 4
LOOK_S = 0.05
BEGIN_S = 1.0
"""A flood has begun after that."""


@dataclass(frozen=True)
class Effort:
    """How long to measure, quiet and in each flood, and which floods."""

    seconds: float
    floods: tuple[str, ...]


EFFORTS = {
    Form.FULL: Effort(60.0, tuple(FLOODS)),
    Form.SHORT: Effort(8.0, tuple(FLOODS)),
    Form.QUICK: Effort(1.0, ("1,000 connections", "endless frames", "64 members hold places")),
}


class Bench(Children):
    """A hub, its honest devices, and a flooder now and then."""

    def __init__(self, folder: Path) -> None:
        super().__init__("benchmarks.security_floods_processes", "benchmarks.security_floods_flooders")
        self._folder = folder

    def __enter__(self) -> Self:
        keys = HubKeys.init(self._folder / "keys")
        pair = KeyPair.make()
        keys.allow(NAME, "device", pair.public)
        names = tuple(f"honest-{number}" for number in range(DEVICES))
        for name in names:
            keys.allow(name, "device", DeviceKeys(self._folder / name).own().public)
        self._hub = self.start(run_hub, str(self._folder / "run"), str(keys.folder))
        self.address, self.most_bytes = self._hub.hear()
        for name in names:
            DeviceKeys(self._folder / name).know(keys.pair().public, (self.address,), name)
        self._target = Target(self.address, keys.pair().public, pair.secret)
        self._devices = self.start(run_devices, str(self._folder), names)
        self._devices.hear()
        return self

    def watch(self, seconds: float) -> tuple[float, int, Seen]:
        """Return exchanges a second, the most memory, and what the hub has seen in the meantime."""
        self._ask_hub()
        before, begin_s = self._answered(), time.monotonic()
        most = 0
        while time.monotonic() < begin_s + seconds:
            most = max(most, self.memory())
            time.sleep(LOOK_S)
        rate = (self._answered() - before) / (time.monotonic() - begin_s)
        return rate, most, self._ask_hub()

    def flood(self, name: str) -> Child:
        """Begin a flood; kill it to end it."""
        flooder = self.start(run_flood, name, self._target)
        flooder.hear()
        return flooder

    def memory(self) -> int:
        """Return the hub's memory in bytes."""
        return resident_bytes(self._hub.process.pid)

    def files(self) -> int:
        """Return how many descriptors the hub has open."""
        return len(list(Path(f"/proc/{self._hub.process.pid}/fd").iterdir()))

    def back_s(self, nbytes: int, files: int) -> float:
        """Return how long it takes until memory and files are back; a little more than a minute at most."""
        begin_s = time.monotonic()
        while self.memory() > nbytes + BACK_BYTES or self.files() > files + BACK_FILES:
            if time.monotonic() > begin_s + BACK_S + 5.0:
                break
            time.sleep(LOOK_S)
        return time.monotonic() - begin_s

    def _answered(self) -> int:
        return int(self._devices.ask())

    def _ask_hub(self) -> Seen:
        seen = self._hub.ask()
        assert isinstance(seen, Seen)
        return seen


def measure(effort: Effort, results: Results) -> None:
    """Measure a quiet time, then each flood."""
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
            rest = {"back after, s": round(back_s, 1), "denied": float(denied)}
            results.add("floods", name, _columns(rate, usual, seen, most) | rest)
            results.ratios[f"{name}: exchanges kept"] = round(rate / usual, 3)
            results.targets[f"{name}: exchanges kept"] = KEPT_MIN
            results.ratios[f"{name}: devices that were not lost"] = 1.0 - seen.lost / DEVICES
            results.targets[f"{name}: devices that were not lost"] = 1.0
            results.bound(f"{name}: loop lag p99", seen.lag_p99_ms, LAG_BOUND_MS)
            results.bound(f"{name}: memory", most, bench.most_bytes)
            results.bound(f"{name}: memory and files back", back_s, BACK_S)
            show_progress(f"  denied so far: {seen.denied}")


def _columns(rate: float, usual: float, seen: Seen, most: int) -> dict[str, float]:
    columns = {
        "exchanges/s": rate,
        "kept, %": 100.0 * rate / usual,
        "lost": seen.lost,
        "live": seen.live,
        "lag p99, ms": seen.lag_p99_ms,
        "lag max, ms": seen.lag_max_ms,
        "memory, MiB": most / 2**20,
    }
    return {column: round(value, 3) for column, value in columns.items()}


def main() -> None:
    """Measure and show."""
    arguments = make_parser("What floods take from twenty honest devices.").parse_args()
    results = Results()
    measure(EFFORTS[arguments.form], results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
