"""What runs until it ends: a start that comes to nothing leaves nothing running."""

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from edgeasync import Hub, Run
from edgeasync.sdk.service import Service
from tests.support.programs.processes import wait_for_threads


class Endless(Service):
    """Is never ready, and ends when it is asked to."""

    def __init__(self):
        super().__init__()
        self._asked = asyncio.Event()

    async def _serve(self):
        if not self._stopping:
            await self._asked.wait()
        return "stopped"

    def _request_stop(self):
        self._asked.set()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_start_that_is_interrupted_ends_what_it_began(monkeypatch):
    service, before = Endless(), threading.active_count()
    monkeypatch.setattr(service._ready, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        service.start()
    wait_for_threads(before)
    assert service.wait(0) == "stopped"


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_ends_what_it_began():
    service = Endless()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), service:
            pass
    assert await asyncio.to_thread(service.wait, 0) == "stopped"


CLOSED = """
import asyncio, sys
import numpy as np
from edgeasync import Agent, Hub
from edgeasync.host import at_exit
from edgeasync.training.numpy_models import SoftmaxModel

at_exit.EXIT_S, data = 0.5, (np.eye(4), [0, 1, 0, 1])
how = {"run": sys.argv[1], "settings": {"hub": {"durability": sys.argv[2]}}}
hub = Hub(SoftmaxModel(inputs=4, classes=2), bind="tcp://127.0.0.1:*", **how)

async def begin():
    await hub.__aenter__()
    with Agent(hub.address, data) as agent:
        while agent.updates_answered < 10:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(agent.stop)
        await agent.wait_async()
    print(hub.status()["version"])

loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
loop.close()
sys.exit(3)
"""


@pytest.mark.parametrize("durability", ["journal", "checkpoint"])
def test_a_hub_whose_loop_was_closed_ends_with_its_program(tmp_path, durability):
    command = [sys.executable, "-c", CLOSED, str(tmp_path), durability]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "the loop of this Hub was closed while it ran; leave `async with` first" in done.stderr
    assert "Traceback" not in done.stderr
    assert Run.open(tmp_path).version >= int(done.stdout)


LATE = """
import asyncio, sys, threading
import numpy as np
from edgeasync import Agent, Hub, Peer, Stop, join, train, train_async
from edgeasync.training.numpy_models import SoftmaxModel

MODEL, DATA, UNTIL = SoftmaxModel(inputs=4, classes=2), (np.eye(4), [0, 1, 0, 1]), Stop(updates=5)
HUB = "tcp://127.0.0.1:9"

async def enter():
    async with Hub(MODEL, run=sys.argv[1], bind="tcp://127.0.0.1:*"):
        pass

WAYS = {
    "Hub": lambda: Hub(MODEL, run=sys.argv[1], bind="tcp://127.0.0.1:*").start(),
    "Hub, async": lambda: asyncio.run(enter()),
    "Agent": lambda: Agent(HUB, DATA).start(),
    "Peer": lambda: Peer(DATA, MODEL, peers="peers.toml", state=sys.argv[1]).start(),
    "join": lambda: join(HUB, {"w": np.zeros(2, np.float32)}).__enter__(),
    "train": lambda: train(MODEL, DATA, until=UNTIL),
    "train_async": lambda: asyncio.run(train_async(MODEL, DATA, until=UNTIL)),
    "train among peers": lambda: train(MODEL, DATA, until=UNTIL, topology="ring"),
    "train in processes": lambda: train(MODEL, DATA, until=UNTIL, engine="processes"),
}

def begin():
    threading.main_thread().join()
    for name, way in WAYS.items():
        try:
            way()
        except Exception as error:
            print(name, type(error).__name__, error, sep=": ")

threading.Thread(target=begin).start()
"""


def test_what_begins_after_the_main_thread_has_ended_says_so(tmp_path):
    command = [sys.executable, "-c", LATE, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    for line in lines:
        assert "EdgeAsyncError: cannot start, because the program is ending; let its main" in line


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX warns of it, if a test before has imported it
def test_a_forked_child_is_told_where_its_parents_hub_runs(tmp_path):
    """Red before: it was said that the hub had ended."""
    with Hub({"w": np.zeros(2, np.float32)}, run=tmp_path, bind="tcp://127.0.0.1:*") as hub:
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            for ask in (hub.status, hub.snapshot, lambda: hub.wait_for(1)):
                try:
                    ask()
                except BaseException as error:  # noqa: BLE001
                    os.write(writing, f"{type(error).__name__}: {error}\n".encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            lines = told.read().splitlines()
        os.waitpid(pid, 0)
    words = "this Hub runs in the parent process: call it there, or create another Hub here"
    assert lines == [f"EdgeAsyncError: {words}"] * 3
