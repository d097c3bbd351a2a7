"""GPU benchmarks of fleets: the parameter server tutorial, and unequal devices of which one is killed."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu_devices import (
    START_S,
    Case,
    Figures,
    accuracies,
    digits,
    network,
    open_hub,
    torch_model,
)
from benchmarks.processes import Child

WIDTH = 64
BATCH = 32
DEVICES = 3
"""Devices of the fleet; the first one uses the GPU."""

UPDATES = {"full": 120, "short": 90, "quick": 6}
"""Updates of each third of the run: with all devices, without the killed one, with all again."""


def tutorial(case: Case) -> Figures:
    """Run the tutorial with a torch module: a parameter server and two workers."""
    from edgeasync.async_train import AsyncWorker, ParameterServer, optim  # noqa: PLC0415

    (x, y), test = digits()
    begun_s = time.perf_counter()
    with ParameterServer(network(WIDTH), port=0, staleness_policy="adaptive_lr") as server:
        found: list[AsyncWorker] = []

        def work(number: int) -> None:
            worker = AsyncWorker(
                server_address=server.hub.address,
                local_batch_size=BATCH,
                update_frequency=4,
                model=network(WIDTH).to(case.device),
                device=case.device,
            )
            found.append(worker)
            worker.train((x[number::2], y[number::2]), epochs=case.effort.passes, optimizer=optim.SGD(lr=0.05))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
        taken_s = time.perf_counter() - begun_s
        if any(case.device != worker.device for worker in found):
            raise RuntimeError(f"the workers have not trained on {case.device}")
        accuracy = found[0].evaluate(test)
    steps = 2 * case.effort.passes * (len(x) // 2 // BATCH)
    return {"accuracy joined %": round(100 * accuracy, 2), "steps/s joined": round(steps / taken_s, 1)}


def _device(number: int, device: str, address: str, state: str, pipe: "Connection[Any, None]") -> None:
    """Run one device of the fleet until it is killed or the hub ends the run."""
    import torch

    from edgeasync import Agent  # noqa: PLC0415
    from edgeasync.torch import model  # noqa: PLC0415

    torch.set_num_threads(1)
    (x, y), _ = digits()
    given = model(network(WIDTH), device=device)
    part = x[number::DEVICES], y[number::DEVICES]
    with Agent(address, part, model=given, name=f"device-{number}", state=state, batch_size=BATCH) as agent:
        agent.wait_until_joined(START_S)
        pipe.send("joined")
        agent.wait()


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    until_s = time.monotonic() + START_S
    while not true():
        if time.monotonic() > until_s:
            raise TimeoutError(what)
        time.sleep(0.05)


def fleet(case: Case) -> Figures:
    """Train with one device on the GPU and two on the CPU; kill and restart the first."""
    from edgeasync.torch import load  # noqa: PLC0415

    wanted = UPDATES[case.form]
    with ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory()))
        context = multiprocessing.get_context("spawn")
        hub = ended.enter_context(open_hub(torch_model(WIDTH), str(folder / "run"), 0))

        def start(number: int) -> Child:
            device = case.device if number == 0 else "cpu"
            child = Child(context, _device, number, device, hub.address, str(folder / f"device-{number}"))
            ended.callback(child.kill)
            return child

        def applied(name: str) -> int:
            devices = {device["id"]: device for device in hub.status()["devices"]}
            return int(devices.get(name, {}).get("updates_applied", 0))

        def train_on(names: list[str]) -> None:
            """Wait until the hub has applied more updates, with at least one from each of `names`."""
            version = hub.status()["version"] + wanted
            had = {name: applied(name) for name in names}
            until(lambda: hub.status()["version"] >= version, "the fleet does not train")
            until(
                lambda: all(applied(name) != before for name, before in had.items()), f"of {names} one is silent"
            )

        children = [start(number) for number in range(DEVICES)]
        for child in children:
            child.hear(START_S)
        everybody = [f"device-{number}" for number in range(DEVICES)]
        begun_s, began = time.perf_counter(), hub.status()["version"]
        train_on(everybody)
        children[0].kill()
        train_on(everybody[1:])
        killed_s = time.perf_counter()
        back = start(0)
        back.hear(START_S)
        back_s = time.perf_counter() - killed_s
        train_on(everybody)
        updates, taken_s = hub.status()["version"] - began, time.perf_counter() - begun_s
        module = load(network(WIDTH), hub.snapshot())
    _, (x, y) = digits()
    import torch

    with torch.no_grad():
        accuracy = float((module(torch.from_numpy(x)).argmax(1).numpy() == y).mean())
    return {
        **{name: value for name, value in accuracies(0.0, accuracy).items() if "joined" in name},
        "updates": float(updates),
        "updates/s": round(updates / taken_s, 1),
        "s until the killed one is back": round(back_s, 1),
    }
