"""The same judgement on real processes: a hub and eight agents on the smartwatch data, one ten times slower."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes import c_double
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import smartwatch
from benchmarks.frequency_processes import PacedTrainer
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.status import fetch_status
from edgeasync.training.plan import read_plan
from edgeasync.training.trainer import Trainer

SETTINGS = """
[hub]
bind = "tcp://127.0.0.1:*"
run = "{run}"
[model]
kind = "mlp"
inputs = 600
hidden = [64]
classes = 7
[local]
optimizer = [{{ kind = "sgd", learning_rate = 0.05 }}]
"""

ANSWER_S = 30.0


def watch_devices(speeds: tuple[float, ...], step_s: float, seconds: float, seed: int) -> list[Mapping[str, Any]]:
    """Let real agents train for a hub; return the devices' parts of its status in the end."""
    people, _ = smartwatch.split_by_person()
    with ExitStack() as stack:
        address = stack.enter_context(_hub(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.judgement"])
        for number, speed in enumerate(speeds):
            part = people[(number + seed) % len(people)]
            process = context.Process(target=run_agent, args=(address, number, part, speed * step_s), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        time.sleep(seconds)
        return list(fetch_status(address, ANSWER_S)["devices"])


def run_agent(address: str, number: int, data: Dataset, step_s: float) -> None:
    """Train for the hub until killed, with steps of this time."""

    def make_trainer(welcome: Welcome) -> Trainer:
        return PacedTrainer(read_plan(welcome.settings).make_trainer(data, number), c_double(step_s))

    identity = DeviceIdentity(f"device-{number + 1}", f"{number:032x}", 1)
    agent = Agent(address, identity=identity, make_trainer=make_trainer, examples=len(data))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(agent.run())


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    settings = folder / "hub.toml"
    settings.write_text(SETTINGS.format(run=folder / "run"), encoding="utf-8")
    command = [sys.executable, "-m", "edgeasync", "hub", str(settings), "--json"]
    with (folder / "events").open("w+", encoding="utf-8") as events:
        process = subprocess.Popen(command, stdout=events, cwd=folder)
        try:
            yield _address(folder / "events", process)
        finally:
            process.terminate()
            process.wait()


def _address(events: Path, process: "subprocess.Popen[bytes]") -> str:
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s and process.poll() is None:
        for line in events.read_text(encoding="utf-8").splitlines():
            if (event := json.loads(line))["event"] == "listening":
                return str(event["detail"])
        time.sleep(0.05)
    raise RuntimeError("the hub did not begin")
