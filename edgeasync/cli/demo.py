"""`edgeasync demo`: a hub and unequal agents on this machine; one agent is killed and rejoins.

The processes run the commands that a person would type. Every device has its own non-IID part of
the digits. The hub itself reports which devices were lost and which joined. The model is a small
convolutional network in an ONNX file, which the hub converts into a training graph for the agents.
"""

import asyncio
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from edgeasync.cli.device_table import device_table
from edgeasync.cli.output import Printer, event_line
from edgeasync.cli.outputs import DemoDevice, DemoResult
from edgeasync.cli.serving import ending_signals
from edgeasync.data.dataset import Dataset
from edgeasync.data.digits import load_digits
from edgeasync.data.partition import dirichlet
from edgeasync.durable.files import FOLDER_MODE, replace_file
from edgeasync.errors import ConfigError, EdgeAsyncError, StorageError
from edgeasync.net.status import fetch_status
from edgeasync.ops.trained import newest_model
from edgeasync.protocol.status import read_status
from edgeasync.web.beside import check_packages

SLOWNESS = (1, 1, 3, 10)
"""Factors by which the agents are slower than the first agent. The sequence repeats if there are
more agents.
"""

STEP_S = 0.004
"""Seconds per local step of the fastest agent: about as long as a step of a small model takes on a
Raspberry Pi 4.
"""

HELD_OUT = 0.2
"""Fraction of the digits that is held out for the final evaluation."""

DIRICHLET_ALPHA = 0.5

EXAMPLES_MIN = 32

REFRESH_S = 0.25

START_S = 30.0
"""Maximum number of seconds that the hub may take to start."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

PIXELS = 8

PAGE = "127.0.0.1:*"
"""The address of the page: any free port, because another hub may use the usual one."""

FORWARD_FILE = "digits-cnn.onnx"
TRAINED_FILE = "trained.onnx"

SETTINGS = """\
[hub]
bind = "tcp://127.0.0.1:*"
run = {run}
quiet = false
seed = {seed}

[model]
kind = "onnx"
file = {model}
loss = "cross_entropy"

[local]
batch_size = 32
optimizer = [{{ kind = "sgd", learning_rate = 0.1 }}]

[liveness]
heartbeat_s = 0.5
lease_s = 1.5
"""


def run_demo(*, devices: int, seconds: float, seed: int, run: Path | None, page: bool, printer: Printer) -> None:
    """Run the demo and print its result; with `--json` the result is the last line.

    If `page` is true, the hub serves its page, and the demo prints the URL.
    """
    if page:
        check_packages()
    started_s = time.monotonic()
    folder = run or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    parts, held_out = split_digits(devices, seed)
    _write(folder, parts, seed)
    show = Show(printer, devices)
    demo = Demo(folder, devices, seconds, show, ["--page", PAGE] if page else [])
    try:
        with show:
            status = asyncio.run(demo.run())
    except asyncio.CancelledError:
        sys.exit(INTERRUPTED)
    from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx; `split_digits` checked for it

    trained, newest = folder / TRAINED_FILE, newest_model(folder)
    replace_file(trained, export_model((folder / FORWARD_FILE).read_bytes(), newest.arrays, newest.metadata()))
    accuracy = measure_accuracy(trained.read_bytes(), held_out)
    result = DemoResult(
        accuracy=round(accuracy, 4),
        devices_total=devices,
        dropped=show.counts["lost"],
        rejoined=show.counts["rejoined"],
        updates_applied=status["updates_applied"],
        updates_rejected=status["updates_rejected"],
        duplicates=status["duplicates"],
        seconds=round(time.monotonic() - started_s, 1),
        model=str(trained.resolve()),
        devices={
            device["id"]: DemoDevice(
                updates_applied=device["updates_applied"], examples_per_s=device["examples_per_s"]
            )
            for device in status["devices"]
        },
    )
    printer.result(
        result,
        *[f"{device['id']:<12} sent {device['updates_applied']} updates" for device in status["devices"]],
        f"accuracy on {len(held_out)} digits that no agent had: {accuracy:.1%}",
        f"dropped {result.dropped}, rejoined {result.rejoined}, in {result.seconds} s",
        f"the model: {result.model}",
    )


def split_digits(devices: int, seed: int) -> tuple[list[Dataset], Dataset]:
    """Return the training digits of each device, float32 (n, 1, 8, 8), and the held-out digits.

    Raises `ConfigError` if onnx is missing.
    """
    if find_spec("onnx") is None:
        raise ConfigError("the demo needs the package onnx: pip install 'edgeasync[hub]'")
    digits = load_digits()
    dataset = Dataset.of(digits.x.reshape(-1, 1, PIXELS, PIXELS), digits.y)
    order = np.random.default_rng(seed).permutation(len(dataset))
    split = round(HELD_OUT * len(dataset))
    parts = dirichlet(dataset.take(order[split:]), devices, DIRICHLET_ALPHA, seed, examples_min=EXAMPLES_MIN)
    return parts, dataset.take(order[:split])


def make_model(seed: int) -> bytes:
    """Return a randomly initialized convolutional network for the digits as serialized ONNX."""
    from edgeasync import nn  # noqa: PLC0415 - needs onnx; `split_digits` checked for it

    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return bytes(nn.to_onnx(network, (1, PIXELS, PIXELS), seed=seed).SerializeToString())


def measure_accuracy(model: bytes, dataset: Dataset) -> float:
    """Return the accuracy of an ONNX classifier in plain onnxruntime."""
    import onnxruntime  # noqa: PLC0415 - not needed before training ends

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: dataset.x})
    return float((scores.argmax(axis=1) == dataset.y).mean())


def _write(folder: Path, parts: list[Dataset], seed: int) -> None:
    """Write the hub's settings, the model, and each device's data."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(FOLDER_MODE)
        settings = SETTINGS.format(
            run=json.dumps(str(folder)), model=json.dumps(str(folder / FORWARD_FILE)), seed=seed
        )
        replace_file(folder / "hub.toml", settings.encode())
        replace_file(folder / FORWARD_FILE, make_model(seed))
        for number, part in enumerate(parts, start=1):
            data = io.BytesIO()
            np.savez(data, x=part.x, y=part.y)
            replace_file(folder / f"device-{number}.npz", data.getbuffer())
    except FileExistsError:
        raise StorageError(f"{folder} exists already; choose another folder with --run") from None
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be written: {error.strerror}; choose another folder with --run"
        ) from error


class Show:
    """Output of the running demo: a live table on a terminal, event lines for scripts."""

    def __init__(self, printer: Printer, devices: int) -> None:
        self.counts = {"lost": 0, "rejoined": 0}
        self._devices = devices
        self._printer = printer
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._lively = not printer.json and self._console.is_terminal

    def __enter__(self) -> Self:
        if self._lively:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lively:
            self._live.stop()

    def event(self, event: str, **details: Any) -> None:
        """Count and print an event."""
        if event in self.counts:
            self.counts[event] += 1
        if self._lively:
            self._console.print(event_line(event, details), highlight=False, markup=False, soft_wrap=True)
        else:
            self._printer.event(event, **details)

    def table(self, status: dict[str, Any], pids: dict[str, int], done: float) -> None:
        """Update the live table; `done` is the fraction of the training time that has passed."""
        if self._lively:
            width = 20
            bar = "━" * round(width * done) + "╌" * (width - round(width * done))
            title = Text(f"{bar} {done:4.0%}  hub pid {status['pid']}  {status['updates_applied']} updates")
            self._live.update(Group(title, device_table(read_status(status).devices, pids)), refresh=True)


class Demo:
    """The processes of the demo. `hub_flags` are more flags of the hub."""

    def __init__(self, folder: Path, devices: int, seconds: float, show: Show, hub_flags: Sequence[str]) -> None:
        self._folder = folder
        self._hub_flags = hub_flags
        self._devices = devices
        self._seconds = seconds
        self._show = show
        self._address = ""
        self._processes: list[asyncio.subprocess.Process] = []
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        self._interrupted = False
        self._lost: dict[str, asyncio.Event] = {}

    async def run(self) -> dict[str, Any]:
        """Train for the given time, and return the hub's last status."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if not self._interrupted:
                self._interrupted = True
                task.cancel()
                return
            # A second cancellation would leave processes behind, so a second Ctrl-C kills the
            # processes instead.
            for process in self._processes:
                _send(process, signal.SIGKILL)

        for signal_number in ending_signals():
            loop.add_signal_handler(signal_number, interrupt)
        hub = await self._spawn("hub", str(self._folder / "hub.toml"), "--json", *self._hub_flags, out=True)
        following = asyncio.create_task(self._follow(hub))
        try:
            await self._await_hub(hub, loop.time() + START_S)
            for number in range(1, self._devices + 1):
                await self._start_agent(number)
            return await self._train(loop.time())
        finally:
            await self._end_agents()
            await _end(hub)
            await following

    async def _await_hub(self, hub: asyncio.subprocess.Process, until_s: float) -> None:
        """Wait until the hub listens.

        Raises `EdgeAsyncError` if the hub exits first or takes too long.
        """
        while not self._address:
            if hub.returncode is not None or asyncio.get_running_loop().time() > until_s:
                raise EdgeAsyncError("the hub did not start; see its message above")
            await asyncio.sleep(REFRESH_S)

    async def _train(self, started_s: float) -> dict[str, Any]:
        """Show progress until the end.

        After half of the time, kill the second agent. Restart it once the hub has reported it lost.
        """
        victim = min(2, self._devices)
        name = f"device-{victim}"
        missed = self._lost.setdefault(name, asyncio.Event())
        killed = restarted = False
        while (done := (asyncio.get_running_loop().time() - started_s) / self._seconds) < 1:
            self._show.table(await self._status(), {n: a.pid for n, a in self._agents.items()}, done)
            if done >= 0.5 and not killed:
                killed = True
                missed.clear()
                self._agents[name].send_signal(signal.SIGKILL)
                await self._agents[name].wait()
                self._show.event("killed", device=name, detail=f"pid {self._agents[name].pid} by SIGKILL")
            if killed and missed.is_set() and not restarted:
                restarted = True
                await self._start_agent(victim)
            for other, agent in self._agents.items():
                if agent.returncode is not None and not (other == name and killed and not restarted):
                    raise EdgeAsyncError(
                        f"agent {other} exited unexpectedly with exit code {agent.returncode}; see its "
                        "message above"
                    )
            await asyncio.sleep(REFRESH_S)
        await self._end_agents()
        status = await self._status()
        self._show.table(status, {n: a.pid for n, a in self._agents.items()}, 1.0)
        return status

    async def _status(self) -> dict[str, Any]:
        return await asyncio.to_thread(fetch_status, self._address, 10.0)

    async def _start_agent(self, number: int) -> None:
        name = f"device-{number}"
        slowness = SLOWNESS[(number - 1) % len(SLOWNESS)]
        self._agents[name] = await self._spawn(
            "agent", "--hub", self._address, "--data", str(self._folder / f"{name}.npz"), "--device-id", name,
            "--state", str(self._folder / name), "--step-s-min", str(STEP_S * slowness), "--json",
        )  # fmt: skip
        self._show.event("started", device=name, detail=f"pid {self._agents[name].pid}, {slowness}x slower")

    async def _follow(self, hub: asyncio.subprocess.Process) -> None:
        """Read the hub's events as they arrive."""
        assert hub.stdout is not None
        async for line in hub.stdout:
            event = json.loads(line)
            name, device, detail = event["event"], event.get("device", ""), event.get("detail", "")
            if name == "listening":
                self._address = detail
            if name in ("page", "joined", "rejoined", "lost", "left", "warning", "alarm", "calm"):
                self._show.event(name, device=device, detail=detail)
            if name == "lost":
                self._lost.setdefault(device, asyncio.Event()).set()

    async def _end_agents(self) -> None:
        await asyncio.gather(*map(_end, self._agents.values()))

    async def _spawn(self, *arguments: str, out: bool = False) -> asyncio.subprocess.Process:
        """Start an edgeasync command in its own process group.

        Ctrl-C therefore reaches only the demo.

        The process exits when its standard input closes, so it also ends if the demo is killed.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "edgeasync.cli.demo_process", *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if out else asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM to a process, and SIGKILL if it still runs after 5 seconds."""
    _send(process, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 5.0)
    except TimeoutError:
        _send(process, signal.SIGKILL)
        await process.wait()


def _send(process: asyncio.subprocess.Process, signal_number: signal.Signals) -> None:
    """Send a signal unless the process has exited."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal_number)
