"""Measure how soon an agent trains: after a start, after SIGKILL and after a hang.

Run as `python -m benchmarks.start`. A supervisor runs the agent as systemd does. The exit code is 1
if a time exceeds its bound.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync.host.notify import JOINED
from edgeasync.ops.service.unit import Unit
from tests.support.boards.supervisor import HANGING, Supervisor
from tests.support.programs.processes import Commands

JOINED_S_MAX = 2.0
KILLED_S_MAX = 5.0
WATCHDOG_S = 1.0
HUNG_S_MAX = WATCHDOG_S + 5.0
ROUNDS = {Form.FULL: 5, Form.SHORT: 3, Form.QUICK: 1}


def time_start(agent: Supervisor) -> float:
    """Return the seconds from the process's start until it has joined."""
    begun_s = time.monotonic()
    with agent:
        return float(agent.wait_for(f"STATUS={JOINED} ")) - begun_s


def time_kill(agent: Supervisor) -> float:
    """Return the seconds from the restart after SIGKILL until it has joined again."""
    with agent:
        agent.wait_for(f"STATUS={JOINED} ")
        agent.process.kill()
        joined_s = agent.wait_for(f"STATUS={JOINED} ", start=2)
        return float(joined_s - agent.begun_s[1])


def time_hang(agent: Supervisor) -> float:
    """Return the seconds from a hung agent's last sign of life until the next start has joined."""
    with agent:
        agent.wait_for("STATUS=hangs: ")
        fed_s = max(time_s for time_s, number, line in agent.news if number == 1 and line == "WATCHDOG=1")
        return float(agent.wait_for(f"STATUS={JOINED} ", start=2) - fed_s)


CASES: dict[str, tuple[Callable[[Supervisor], float], float]] = {
    "start to joined": (time_start, JOINED_S_MAX),
    "joined again after SIGKILL": (time_kill, KILLED_S_MAX),
    "joined again after a hang": (time_hang, HUNG_S_MAX),
}
"""Case -> what to time, and its bound in seconds."""


def measure(name: str) -> float:
    """Return the seconds of a case, which has its own hub."""
    take, _ = CASES[name]
    with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
        _, address = commands.hub(commands.settings())
        data = f'data = "{commands.data("a.npz")}"'
        own = f'trainer = "hanging:make_trainer"\nprogress_s = {WATCHDOG_S / 2}' if take is time_hang else data
        (commands.folder / "hanging.py").write_text(HANGING)
        settings = f'[agent]\nhub = "{address}"\n{own}\ndevice_id = "pi-1"\nstate = "state"\nstep_s_min = 0.01\n'
        (commands.folder / "agent.toml").write_text(settings)
        unit = Unit("agent", Path("/opt/edgeasync/current/bin/edgeasync"), commands.folder)
        watchdog_s = f"{WATCHDOG_S:g}" if take is time_hang else "60"
        return take(Supervisor(unit.text(), commands.folder, WatchdogSec=watchdog_s))


@benchmark("How soon an agent trains.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Time every case, and compare the medians with the bounds."""
    for name, (_, bound_s) in CASES.items():
        show_progress(name)
        rounds = [measure(name) for _ in range(ROUNDS[arguments.form])]
        median_s = statistics.median(rounds)
        figures = {"median": median_s, "worst": max(rounds), "bound": bound_s}
        results.add("seconds", name, figures)
        results.bound(name, median_s, bound_s)


if __name__ == "__main__":
    main()
