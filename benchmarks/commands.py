"""How long commands take: the demo, the end after a signal, and the check of a model's gradients.

Run as `python -m benchmarks.commands`. It ends with exit code 1 if one takes longer than its bound.
"""

import json
import signal
import tempfile
import time
from collections.abc import Callable, Mapping

from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.graphs import LENET
from tests.support.programs.processes import Command, Commands, trained

STEP_S = 600.0
"""A local step of an agent that is to end in the middle of it."""

ENDED_S_MAX = 15.0


def time_demo(commands: Commands) -> float:
    """Return how long the demo says that it took: it trains for 15 s."""
    demo = commands.start("demo", "--json", "--run", "demo")
    _check_exit_code(demo, demo.wait())
    return float(json.loads(demo.lines[-1])["seconds"])


def time_end_of_hub(commands: Commands) -> float:
    """Return how long a hub takes to end after SIGTERM."""
    hub, address = commands.hub(commands.settings())
    commands.agent(address, "device")
    trained(address, 5)
    return _end_s(hub)


def time_end_of_agent(commands: Commands) -> float:
    """Return how long an agent takes to end after SIGTERM in the middle of a long local step."""
    _, address = commands.hub(commands.settings())
    agent = commands.agent(address, "device", step_s=STEP_S)
    agent.wait_for("joined")
    return _end_s(agent)


def time_check(_: Commands) -> float:
    """Return the processor time of a check of LeNet's gradients."""
    built = build_training_graph(nn.to_onnx(LENET, (1, 28, 28)).SerializeToString(), GraphSettings())
    begun_s = time.process_time()
    check_gradients(built.model, built.spec, built.initial)
    return time.process_time() - begun_s


def _end_s(command: Command) -> float:
    begun_s = time.monotonic()
    command.signal(signal.SIGTERM)
    _check_exit_code(command, command.wait())
    return time.monotonic() - begun_s


def _check_exit_code(command: Command, code: int) -> None:
    if code:
        raise RuntimeError(f"exit code {code}: {command}")


ENDS: Mapping[str, tuple[Callable[[Commands], float], float]] = {
    "end of a hub": (time_end_of_hub, ENDED_S_MAX),
    "end of an agent in a step of ten minutes": (time_end_of_agent, ENDED_S_MAX),
}
CASES = {"demo": (time_demo, 60.0), "check of LeNet's gradients, CPU": (time_check, 10.0), **ENDS}
"""By name, what to time and its bound in seconds."""


def main() -> None:
    """Time every case; quickly, the ends alone."""
    arguments = make_parser("How long commands take.").parse_args()
    results = Results()
    for name, (measure, bound_s) in (ENDS if arguments.form == Form.QUICK else CASES).items():
        show_progress(name)
        with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
            seconds = measure(commands)
        results.add("seconds", name, {"measured": round(seconds, 3), "bound": bound_s})
        results.bound(name, seconds, bound_s)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
