"""The memory that a hub needs for devices that ask and never read, beside two agents that train.

Run as `python -m benchmarks.overload`. Eight members ask for models as fast as they can, and read nothing. It ends
with exit code 1 if the hub takes more for them than its bound.
"""

import tempfile
import time

from benchmarks.processes import resident_bytes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from tests.support.programs.gluttons import Glutton, start_training
from tests.support.programs.processes import Commands, trained

GLUTTONS = 8
ASKED_AT_A_TIME = 200
LOOK_S = 0.005
COSTS_BYTES_MAX = 128 << 20
"""Bound for all of them together, with a model of 0.7 MB."""

SECONDS = {Form.FULL: 3.0, Form.SHORT: 3.0, Form.QUICK: 0.1}


def measure(seconds: float, results: Results) -> None:
    """Let the members ask for `seconds`, and note the largest growth of the hub's memory."""
    with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
        hub, address = start_training(commands)
        before = trained(address, 10)
        usual = most = resident_bytes(hub.pid)
        gluttons = [Glutton(address, f"glutton-{number}") for number in range(GLUTTONS)]
        try:
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + seconds:
                for glutton in gluttons:
                    glutton.ask(ASKED_AT_A_TIME)
                most = max(most, resident_bytes(hub.pid))
                time.sleep(LOOK_S)
            after = trained(address, 5)
        finally:
            for glutton in gluttons:
                glutton.close()
    name = f"{GLUTTONS} members that never read"
    columns = {
        "asked": sum(glutton.asked for glutton in gluttons),
        "updates meanwhile": after["updates_applied"] - before["updates_applied"],
        "hub before, MiB": usual / 2**20,
        "most beyond, MiB": (most - usual) / 2**20,
        "bound, MiB": COSTS_BYTES_MAX / 2**20,
    }
    results.add("overload", name, {column: round(value, 2) for column, value in columns.items()})
    results.bound(f"{name}: the hub's memory", most - usual, COSTS_BYTES_MAX)


def main() -> None:
    """Measure and show."""
    arguments = make_parser("What devices that never read cost a hub.").parse_args()
    seconds = SECONDS[arguments.form]
    results = Results()
    show_progress(f"{GLUTTONS} members that never read: {seconds:g} s")
    measure(seconds, results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
