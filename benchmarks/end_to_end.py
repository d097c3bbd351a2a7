"""What users run: a hub and four agents as commands, one local step per exchange, beside Flower and Ray.

Run as `python -m benchmarks.end_to_end`. The peers run in environments of their own, because their packages
conflict with ours. `--install-peers` creates these; without them, only our own configurations are measured. In
every round, each system has its turn: its processes start, warm up, are measured for a window, and end. A ratio is
the median over the rounds of our rate divided by the peer's rate in the same round.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import psutil

from benchmarks.processes import PATIENCE_S, peak_resident_bytes, resident_bytes
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from benchmarks.surroundings import ROOT
from edgeasync.net.status import fetch_status

AGENTS = 4
SUPERLINK = "Flower SuperLink"
LOOK_S = 0.05

FLOAT32 = '[codec]\npush = "identity"\nmodel = "identity"\ndelta = "off"\n'
INT8 = '[codec]\npush = "int8"\ndelta = "int8"\n'

PEERS_FOLDER = ROOT / ".peers"
PEERS = {"flower": ("flwr==1.42.0", "numpy"), "ray": ("ray==2.60.0", "numpy")}
"""By environment, what is installed into it."""


@dataclass(frozen=True)
class Case:
    """A size of model, and what our defaults should reach: milliseconds of CPU, and ratios to the peers."""

    name: str
    length: int
    hub_ms_max: float | None = None
    agent_ms_max: float | None = None
    forced_ms_max: tuple[float, float] | None = None
    """The same for hub and agent with int8 forced."""
    over_flower: float | None = None
    over_ray: float | None = None


CASES = (
    Case("4 KB", 1_000, 0.7, 0.8, None, 2.0, 1.1),
    Case("1 MB", 250_000, 2.5, 2.8, (3.8, 3.5), 2.0, 1.3),
    Case("10 MB", 2_500_000),
)


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds, and the seconds of warm-up and window in each turn."""

    rounds: int
    warm_up_s: float
    window_s: float


EFFORTS = {Form.FULL: Effort(7, 3.0, 5.0), Form.SHORT: Effort(3, 2.0, 3.0), Form.QUICK: Effort(1, 0.2, 0.5)}


class Program:
    """A process whose lines on standard output are followed; its standard error goes to a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = f"{Path(arguments[0]).parent}:{os.environ['PATH']}"
        own = {"PYTHONPATH": str(ROOT)} if arguments[0] == sys.executable else {}
        variables = os.environ | {"HOME": str(folder), "PATH": path, "PYTHONUNBUFFERED": "1"} | own
        with (folder / "stderr.txt").open("ab") as errors:
            self._process = subprocess.Popen(
                arguments, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._news = threading.Condition()
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def line(self, beginning: str) -> str:
        """Wait for a line that begins so; return the rest of it."""
        with self._news:
            if not self._news.wait_for(
                lambda: any(line.startswith(beginning) for _, line in self._lines), PATIENCE_S
            ):
                raise TimeoutError(f"no line {beginning!r} from {self._process.args!r}")
            return next(line for _, line in self._lines if line.startswith(beginning)).removeprefix(beginning)

    def latest(self, beginning: str) -> tuple[float, str]:
        """Return the latest line that begins so, without the beginning, and when it came."""
        with self._news:
            found = [(at_s, line) for at_s, line in self._lines if line.startswith(beginning)]
        return (found[-1][0], found[-1][1].removeprefix(beginning)) if found else (time.monotonic(), "0")

    def end(self) -> None:
        """End the process, and those that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
            self._process.terminate()
            _, left = psutil.wait_procs(family, 5.0)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with self._news:
                self._lines.append((time.monotonic(), line.rstrip()))
                self._news.notify_all()


class System(ABC):
    """A server and its clients while they run."""

    server_pids: list[int]
    client_pids: list[int]
    idle_bytes: int = 0
    patience_s: float = PATIENCE_S
    window_s_min: float = 0.0

    @abstractmethod
    def updates(self) -> tuple[float, int]:
        """Return a moment and the number of updates until then."""

    def traffic_bytes(self) -> int:
        """Return the bytes sent and received so far, or 0 if the system does not count them."""
        return 0


class Ours(System):
    """A hub and agents, as the commands start them."""

    def __init__(self, folder: Path, length: int, stack: ExitStack, hub: str = "", tables: str = "") -> None:
        (folder / "hub.toml").write_text(
            f'[hub]\nbind = "tcp://127.0.0.1:*"\nrun = "run"\n{hub}\n'
            f'[model]\nkind = "custom"\nfactory = "benchmarks.end_to_end_model:model_{length}"\n'
            f'[policy.frequency]\nkind = "fixed"\nlocal_steps = 1\n{tables}'
        )
        run = (sys.executable, "-m", "edgeasync")
        served = _start(stack, folder, *run, "hub", "hub.toml", "--json")
        self.address = str(json.loads('{"event":"listening",' + served.line('{"event":"listening",'))["detail"])
        self.server_pids, self.idle_bytes = [served.pid], resident_bytes(served.pid)
        own = ("--trainer", "benchmarks.end_to_end_model:trainer")
        self.client_pids = [
            _start(
                stack, folder, *run, "agent", "--hub", self.address, *own, "--device-id", name, "--state", name
            ).pid
            for name in (f"device-{number}" for number in range(AGENTS))
        ]

    def updates(self) -> tuple[float, int]:
        """Ask the hub."""
        return time.monotonic(), fetch_status(self.address, PATIENCE_S)["updates_applied"]

    def traffic_bytes(self) -> int:
        """Ask the hub."""
        traffic = fetch_status(self.address, PATIENCE_S)["traffic"]
        return int(traffic["bytes_up"] + traffic["bytes_down"])


class Flower(System):
    """FedAvg behind `start_server`, and `start_client`s."""

    def __init__(self, folder: Path, length: int, stack: ExitStack, python: Path) -> None:
        run, port = (str(python), str(ROOT / "benchmarks/end_to_end_flower.py")), str(_free_port())
        self._server = _start(stack, folder, *run, "server", port, str(length))
        self.server_pids = [self._server.pid]
        clients = [_start(stack, folder, *run, "client", port, str(length)) for _ in range(AGENTS)]
        self.client_pids = [client.pid for client in clients]

    def updates(self) -> tuple[float, int]:
        """Return what the server printed last."""
        at_s, count = self._server.latest("updates ")
        return at_s, int(count)


class Ray(System):
    """A parameter server that is an actor, and workers that are actors."""

    def __init__(self, folder: Path, length: int, stack: ExitStack, python: Path) -> None:
        program = str(ROOT / "benchmarks/end_to_end_ray.py")
        self._driver = _start(stack, folder, str(python), program, str(length), str(AGENTS))
        pids = json.loads(self._driver.line("processes "))
        self.server_pids, self.client_pids = [pids["server"]], pids["clients"]

    def updates(self) -> tuple[float, int]:
        """Return what the driver printed last."""
        at_s, count = self._driver.latest("updates ")
        return at_s, int(count)


APP = """[project]
name = "noise"
version = "1.0.0"
description = "A client that adds noise"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "edgeasync"
[tool.flwr.app.components]
serverapp = "end_to_end_superlink:server"
clientapp = "end_to_end_superlink:client"
[tool.flwr.app.config]
length = 0
counts = ""
"""


class SuperLink(System):
    """FedAvg on a SuperLink, and SuperNodes, which start a process for every message."""

    patience_s = 180.0
    window_s_min = 40.0

    def __init__(self, folder: Path, length: int, stack: ExitStack, python: Path) -> None:
        run, address = python.parent, f"127.0.0.1:{(port := _free_port())}"
        for name in ("app", ".flwr"):
            (folder / name).mkdir()
        (folder / "app/pyproject.toml").write_text(APP)
        shutil.copy(ROOT / "benchmarks/end_to_end_superlink.py", folder / "app")
        (folder / ".flwr/config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        self._counts = folder / "counts"
        served = _start(stack, folder, str(run / "flower-superlink"), "--insecure", "--port", str(port))
        _await_port(port)
        node = (str(run / "flower-supernode"), "--insecure", "--superlink", address, "--port")
        clients = [_start(stack, folder, *node, str(_free_port())) for _ in range(AGENTS)]
        self.server_pids, self.client_pids = [served.pid], [client.pid for client in clients]
        config = f"length={length} counts='{self._counts}'"
        _start(stack, folder, str(run / "flwr"), "run", "app", "here", "--run-config", config)

    def updates(self) -> tuple[float, int]:
        """Return what the server wrote last, and when."""
        if not self._counts.exists():
            return time.monotonic(), 0
        age_s = time.time() - self._counts.stat().st_mtime
        return time.monotonic() - age_s, int(self._counts.read_text().split()[-1])


Start = Callable[[Path, int, ExitStack], System]

OURS: Mapping[str, Start] = MappingProxyType({
    "defaults": Ours,
    "float32, journal": partial(Ours, tables=FLOAT32),
    "float32, checkpoint": partial(Ours, hub='durability = "checkpoint"\n', tables=FLOAT32),
    "int8 forced": partial(Ours, tables=INT8),
})  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """What a system did in one window; the memory of clients is their mean."""

    updates_per_s: float
    server_ms: float
    client_ms: float
    kilobytes: float
    idle_mb: float
    server_mb: float
    client_mb: float


def measure(start: Start, length: int, effort: Effort) -> Turn:
    """Give a system its turn."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        system = start(Path(name), length, stack)
        deadline_s = time.monotonic() + system.patience_s
        while system.updates()[1] < 2 * AGENTS:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no updates: {(Path(name) / 'stderr.txt').read_text()[-2000:]}")
            time.sleep(LOOK_S)
        time.sleep(effort.warm_up_s)
        pids = [system.server_pids, system.client_pids]
        looks = []
        for _ in range(2):
            used = [sum(map(_family_cpu_s, group)) for group in pids]
            looks.append((*system.updates(), *used, system.traffic_bytes()))
            time.sleep(max(effort.window_s, system.window_s_min) * (len(looks) == 1))
        (from_s, before, *spent), (to_s, after, *spent_after) = looks
        count = max(1, after - before)
        server_s, clients_s, nbytes = (late - early for early, late in zip(spent, spent_after, strict=True))
        return Turn(
            (after - before) / max(to_s - from_s, 1e-9),
            1e3 * server_s / count,
            1e3 * clients_s / count,
            nbytes / count / 1e3,
            system.idle_bytes / 1e6,
            sum(map(peak_resident_bytes, system.server_pids)) / 1e6,
            sum(map(peak_resident_bytes, system.client_pids)) / AGENTS / 1e6,
        )


def run_case(case: Case, systems: Mapping[str, Start], results: Results, effort: Effort) -> None:
    """Measure one size and add what was found."""
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    for number in range(effort.rounds):
        show_progress(f"{case.name}: round {number + 1} of {effort.rounds}")
        for name, start in systems.items():
            if name == SUPERLINK and number:
                continue  # it exchanges an update in seconds: one turn tells its rate
            turns[name].append(measure(start, case.length, effort))
    for name, found in turns.items():
        rates = [turn.updates_per_s for turn in found]
        row = f"{case.name}, {name}"
        columns = {"median": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
        results.add("updates per second", row, columns, 1)
        spent = {
            "server": statistics.median(turn.server_ms for turn in found),
            "client": statistics.median(turn.client_ms for turn in found),
            "server, highest": max(turn.server_ms for turn in found),
            "client, highest": max(turn.client_ms for turn in found),
        }
        results.add("CPU, ms per update", row, spent)
        memory = {
            "server idle": found[-1].idle_mb,
            "server at most": max(turn.server_mb for turn in found),
            "client at most": max(turn.client_mb for turn in found),
        }
        results.add("memory, MB", row, {key: value for key, value in memory.items() if value}, 1)
        if found[-1].kilobytes:
            results.add("KB per update, both ways", row, {"KB": found[-1].kilobytes}, 1)
    _add_targets(case, turns, results)


def _add_targets(case: Case, turns: Mapping[str, list[Turn]], results: Results) -> None:
    """Add the ratios of our default settings."""
    ours, bounds = turns["defaults"], (case.hub_ms_max, case.agent_ms_max)
    for kind, found, limits in (
        ("defaults", ours, bounds),
        ("int8 forced", turns.get("int8 forced", []), case.forced_ms_max or (None, None)),
    ):
        for who, measured, limit in (
            ("hub", [turn.server_ms for turn in found], limits[0]),
            ("agent", [turn.client_ms for turn in found], limits[1]),
        ):
            if limit is not None and measured:
                results.bound(f"{case.name}, {kind}: ms of the {who}", statistics.median(measured), limit)
    for peer, target in (("Flower", case.over_flower), ("Ray", case.over_ray)):
        if peer in turns:
            pairs = zip(ours, turns[peer], strict=True)
            ratio = statistics.median(mine.updates_per_s / theirs.updates_per_s for mine, theirs in pairs)
            results.ratio(f"{case.name}, updates per second: defaults / {peer}", ratio, target)


def install_peers() -> None:
    """Create the environments of the peers."""
    for name, packages in PEERS.items():
        show_progress(f"installing {', '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", PEERS_FOLDER / name], check=True)
        subprocess.run([_python(name), "-m", "pip", "install", "-q", *packages], check=True)


def peer_systems(form: Form) -> dict[str, Start]:
    """Return the peers that are installed; in quick form, without the SuperLink, whose first round takes long."""
    flower, ray = _python("flower"), _python("ray")
    found: dict[str, Start] = {}
    if flower.exists():
        found["Flower"] = partial(Flower, python=flower)
        if form != Form.QUICK:
            found[SUPERLINK] = partial(SuperLink, python=flower)
    if ray.exists():
        found["Ray"] = partial(Ray, python=ray)
    return found


def _python(peer: str) -> Path:
    return PEERS_FOLDER / peer / "bin/python"


def _start(stack: ExitStack, folder: Path, *arguments: str) -> Program:
    """Start a program that ends with the stack."""
    program = Program(folder, *arguments)
    stack.callback(program.end)
    return program


def _family_cpu_s(pid: int) -> float:
    """Return the CPU time of a process, of the processes that it started, and of those that have ended."""
    process = psutil.Process(pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _await_port(port: int) -> None:
    """Wait until a program listens on a port."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(LOOK_S)
    raise TimeoutError(f"nothing listens on port {port}")


def _free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("Updates per second and CPU of real hubs and agents, beside Flower and Ray.")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="only these sizes")
    parser.add_argument("--system", nargs="+", help="only these systems; 'defaults' is always measured")
    parser.add_argument("--install-peers", action="store_true", help="first install Flower and Ray into .peers")
    return parser


@benchmark(_parser())
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure every size."""
    if arguments.install_peers:
        install_peers()
    systems = {**OURS, **peer_systems(arguments.form)}
    if arguments.system:
        systems = {name: start for name, start in systems.items() if name in ("defaults", *arguments.system)}
    for case in CASES[: 1 if arguments.form == Form.QUICK else None]:
        if case.name in (arguments.case or [each.name for each in CASES]):
            run_case(case, systems, results, EFFORTS[arguments.form])


if __name__ == "__main__":
    main()
