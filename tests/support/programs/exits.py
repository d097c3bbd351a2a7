"""Programs that end although services run.

Tests run each once, in a fork of a process that has imported all they need (`wrong_ends`).
"""

import asyncio
import importlib
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from edgeasync import Agent, Hub, Peer, Stop, join, nn, train
from edgeasync.graphs.model_file import read_model
from edgeasync.runtime.peer import PEER_MODEL_FILE, PeerRuntime
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.peers import FILE, name_of, write_list

X = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
DATA = X, (X[:, 0] > 0).astype(np.int64)
ENDS = {"normal": 0, "error": 1, "sys.exit(3)": 3}
ERROR = "ValueError: the program's own"
VERSIONS = 3
FORKS = 4
PATIENCE_S = 60.0
FOR_EVER = Stop(updates=10**9)


def numpy_model():
    return SoftmaxModel(inputs=4, classes=2), None


def onnx_model():
    return nn.Linear(4, 2), None


def torch_model():
    torch, ours = importlib.import_module("torch"), importlib.import_module("edgeasync.torch")
    made = ours.model(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    return made, made


MODELS = {"numpy": numpy_model, "ONNX": onnx_model, "torch": torch_model}
"""What the hub has, and what a device trains if the hub does not send it."""


class Seen:
    """Writes down the newest version that was made."""

    def __init__(self, folder):
        self._file, self.enough = folder / "seen", threading.Event()

    def on_version(self, event):
        self._file.write_text(str(event.version))
        if event.version >= VERSIONS:
            self.enough.set()

    def wait(self):
        assert self.enough.wait(PATIENCE_S)


def start_hub(folder, hub_model, seen):
    shape = {"input_shape": (4,)} if isinstance(hub_model, nn.Layer) else {}
    return Hub(hub_model, run=folder / "run", bind="tcp://127.0.0.1:*", callbacks=[seen], **shape).start()


def until(condition):
    until_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return found


def hub(folder, kind):
    """A hub, with the agent that it needs."""
    (hub_model, own), seen = MODELS[kind](), Seen(folder)
    hub = start_hub(folder, hub_model, seen)
    Agent(hub.address, DATA, model=own, name="a").start()
    seen.wait()


def agent(folder, kind):
    """Three agents that train on while their hub is away."""
    (hub_model, own), seen = MODELS[kind](), Seen(folder)
    hub = start_hub(folder, hub_model, seen)
    agents = [Agent(hub.address, DATA, model=own, name=f"a{n}", alone_steps_max=10**6).start() for n in range(3)]
    seen.wait()
    for each in agents:
        each.wait_until_joined(PATIENCE_S)
    hub.stop()
    hub.wait()


def joined(folder, kind):
    """A loop that has joined, and takes no more steps."""
    (hub_model, _), seen = MODELS[kind](), Seen(folder)
    hub = start_hub(folder, hub_model, seen)
    model = hub.snapshot()
    if kind == "torch":
        model = importlib.import_module("torch").nn.Linear(4, 2)
    session = join(hub.address, model)
    while not seen.enough.is_set():
        session.step()


def peers(folder, kind):
    """Two peers."""
    write_list(folder, (0, 1))
    peers = []
    for number in (0, 1):
        model, _ = MODELS[kind]()
        name = name_of(number)
        peers.append(
            Peer(DATA, model, peers=folder / FILE, name=name, state=folder / name, round_every_s=0.05).start()
        )
    until(lambda: min(each.rounds for each in peers) >= VERSIONS)
    (folder / "seen").write_text(str(peers[0].evaluate(lambda _: 0.0).version))


def training(folder, kind):
    """`train` in another thread."""
    (model, _), seen = MODELS[kind](), Seen(folder)
    how = {"run": folder / "run", "callbacks": [seen], "until": FOR_EVER, "workers": 2}
    threading.Thread(target=train, args=(model, DATA), kwargs=how).start()
    seen.wait()


def training_among_peers(folder, kind):
    """`train` without a hub, in another thread."""
    (model, _) = MODELS[kind]()
    how = {"run": folder / "run", "until": Stop(epochs=10**6), "workers": 2, "topology": "ring"}
    made, begin = [], PeerRuntime.__init__

    def note(peer, *arguments, **named):
        begin(peer, *arguments, **named)
        made.append(peer)

    PeerRuntime.__init__ = note
    threading.Thread(target=train, args=(model, DATA), kwargs=how, daemon=True).start()

    (folder / "seen").write_text(
        str(until(lambda: [peer for peer in made if peer.rounds >= VERSIONS])[0].steps_total)
    )


def on_a_stopped_loop(folder, kind):
    """A hub and an agent that were entered on a loop, which then stopped; the hub has only checkpoints."""
    (hub_model, own), seen = MODELS[kind](), Seen(folder)
    how = {"run": folder / "run", "callbacks": [seen], "settings": {"hub": {"durability": "checkpoint"}}}
    shape = {"input_shape": (4,)} if isinstance(hub_model, nn.Layer) else {}
    hub = Hub(hub_model, bind="tcp://127.0.0.1:*", **how, **shape)

    async def begin():
        await hub.__aenter__()
        await Agent(hub.address, DATA, model=own, name="a").__aenter__()
        await asyncio.to_thread(seen.wait)

    asyncio.new_event_loop().run_until_complete(begin())


SERVICES = {
    "hub": hub, "agent": agent, "join": joined, "peers": peers, "train": training,
    "train among peers": training_among_peers, "stopped loop": on_a_stopped_loop,
}  # fmt: skip


def run(folder, service, kind, end):
    """Be a program; this returns, or raises what it ends with."""
    SERVICES[service](Path(folder), kind)
    if end == "error":
        raise ValueError("the program's own")
    if end == "sys.exit(3)":
        sys.exit(3)


def what_is_wrong(folder, end, code, stderr):
    """Return what is wrong with a program that has ended, or nothing."""
    errors = [line for line in stderr.splitlines() if "Error:" in line]
    if code != ENDS[end] or errors != [ERROR] * (end == "error") or "still run" in stderr:
        return f"exit code {code}: {stderr[-2000:]}"
    seen = int((folder / "seen").read_text())
    files = folder / "run" / "model.safetensors", folder / name_of(0) / PEER_MODEL_FILE
    kept = max((read_model(file).version for file in files if file.exists()), default=-1)
    return "" if kept >= seen else f"version {seen} was made, {kept} is on disk"


def wrong_ends(folder, kind, ends):
    """Run the programs for a kind of model in forks, each with this number of ends; return what ended wrongly.

    With one end, programs and kinds take turns at the three.
    """
    command = [sys.executable, "-m", "tests.support.programs.exits", str(folder), kind, str(ends)]
    # onnxruntime's telemetry has a thread, and a process that forks must have no other.
    quiet = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=quiet).stdout.splitlines()


def run_forks(folder, kind, ends):
    """Fork for each program, and print those that ended wrongly; a fork returns the program that it is to be."""
    for module in ("onnx", "onnxruntime", *["edgeasync.torch", "torch._dynamo"] * (kind == "torch")):
        importlib.import_module(module)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork has one thread, and the locks of all"
    turns = itertools.count([*MODELS].index(kind))
    chosen = [
        (service, kind, [*ENDS][(turn + more) % 3])
        for service, turn in zip(SERVICES, turns, strict=False)
        for more in range(ends)
    ]
    running, waiting = {}, chosen
    while running or waiting:
        while waiting and len(running) < FORKS:
            program = waiting.pop()
            place = Path(folder) / "-".join(program)
            place.mkdir()
            if not (pid := os.fork()):
                os.dup2(os.open(place / "stderr", os.O_WRONLY | os.O_CREAT), 2)
                return place, *program
            running[pid] = place, *program
        pid, status = os.wait()
        place, *program = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if wrong := what_is_wrong(place, program[-1], code, (place / "stderr").read_text()):
            tell(*program, wrong)
    return None


def tell(*words):
    sys.stdout.write(" ".join(map(str, words)).replace("\n", " | ") + "\n")
    sys.stdout.flush()


def main():
    folder, kind, ends = sys.argv[1:]
    if program := run_forks(folder, kind, int(ends)):
        run(*program)


if __name__ == "__main__":
    main()
