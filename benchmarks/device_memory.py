"""Measure a training agent's peak memory against the bounds for small boards.

Run as `python -m benchmarks.device_memory` on Linux, which reports the peak. The exit code is 1 if
an agent exceeds its bound.
"""

import argparse
import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import peak_resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync import nn
from tests.support.models.graphs import LENET
from tests.support.programs.processes import Commands, trained

MIB = 1 << 20
MLP = 'kind = "mlp"\ninputs = 64\nhidden = [64]\nclasses = 10'
DEVICE = "small"


@dataclass(frozen=True)
class Case:
    """What an agent trains, and the bound of its peak.

    `forward` is an ONNX model, `table` a numpy one.
    """

    name: str
    bound_bytes: int
    examples: int
    inputs: int
    table: str = ""
    forward: Any = None


CASES = (
    Case("numpy: MLP, 64-64-10", 64 * MIB, 2000, 64, table=MLP),
    # onnxruntime takes 20 MiB before it has done anything; the tensors take 9 MiB.
    Case("training graph: LeNet", 100 * MIB, 256, 28 * 28, forward=LENET),
)


@dataclass(frozen=True)
class Effort:
    """How many agents to measure, each with its own hub, and after how many updates."""

    agents: int
    updates: int


OFTEN = '[policy]\nfrequency = { kind = "fixed", local_steps = 8 }\n'
"""The default policy exchanges five times a second.

It would need the benchmark's whole time limit for 200 updates.
"""

EFFORTS = {Form.FULL: Effort(5, 200), Form.SHORT: Effort(1, 200), Form.QUICK: Effort(1, 5)}


def measure(case: Case, updates: int) -> int:
    """Return the peak of one agent's resident memory, in bytes."""
    with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
        model = case.table
        if case.forward is not None:
            nn.save(case.forward, commands.folder / "model.onnx", (1, 28, 28))
            model = 'kind = "onnx"\nfile = "model.onnx"'
        _, address = commands.hub(commands.settings(model=model, more=OFTEN))
        data = commands.data("data.npz", examples=case.examples, inputs=case.inputs, classes=10)
        agent = commands.agent(address, DEVICE, data=data, step_s=0.0)
        trained(address, updates, DEVICE)
        return peak_resident_bytes(agent.pid)


@benchmark("The peak of a device's memory.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure all cases; the agent with the highest peak counts."""
    effort = EFFORTS[arguments.form]
    for case in CASES:
        peaks = []
        for number in range(effort.agents):
            show_progress(f"{case.name}: agent {number + 1} of {effort.agents}, {effort.updates} updates")
            peaks.append(measure(case, effort.updates))
        columns = {"peak": max(peaks) / MIB, "least peak": min(peaks) / MIB, "bound": case.bound_bytes / MIB}
        results.add("resident memory, MiB", case.name, columns, 2)
        results.bound(case.name, max(peaks), case.bound_bytes)


if __name__ == "__main__":
    main()
