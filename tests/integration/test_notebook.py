"""A notebook, run as Jupyter runs it: a blocking call, live numbers, an interrupt, and what is left behind."""

import asyncio
from pathlib import Path

import pytest

from tests.support.programs.processes import PATIENCE_S

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

CELLS = {
    "begin": """
import asyncio, os, tempfile, threading, time
import numpy as np
from edgeasync import Agent, Hub, Run, Stop, train
from edgeasync.training.numpy_models import SoftmaxModel

class Mine:
    parameters = {"weight": np.zeros((4, 2))}

    def gradient(self, arrays, x, y):
        return float(np.abs(arrays["weight"]).sum()), {"weight": np.full((4, 2), 1e-3)}

SMALL = SoftmaxModel(inputs=4, classes=2)
x, y = np.eye(4), [0, 1, 0, 1]

class Live:
    def on_version(self, event):
        if event.version % 10 == 0:
            print("version", event.version, flush=True)
""",
    "train": """
asyncio.get_running_loop()
run = train(Mine(), (x, y), workers=2, until=Stop(updates=60), callbacks=[Live()])
print(run.updates >= 60 and run.model["weight"].max() < 0)
""",
    "serve": """
hub = Hub(SMALL, run="served", bind="tcp://127.0.0.1:*").start()
agent = Agent(hub.address, (x, y)).start()
hub.wait_for(devices=1, timeout_s=60)
""",
    "live": """
while not len(history := hub.history):
    time.sleep(0.05)
print(history["device"][0] in {device["id"] for device in hub.status()["devices"]})
""",
    "look": """
print(len(hub.status()["devices"]), sorted(hub.snapshot()))
agent.stop(), agent.wait(), hub.stop()
print(hub.wait())
""",
    "interrupt": """
train(Mine(), (x, y), workers=2, run="run", until=Stop(updates=10**9), callbacks=[Live()])
""",
    "resume": """
version = Run.open("run").version
run = train(Mine(), (x, y), workers=2, run="run", until=Stop(epochs=20))
print(run.version > version >= 20 and len(run.history) >= run.updates)
""",
    "processes": """
print(train(Mine(), (x, y), workers=2, engine="processes", until=Stop(updates=10)).updates >= 10)
""",
    "repeat": """
def left():
    files = os.listdir(tempfile.gettempdir())
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), len(files)

def once():
    train(Mine(), (x, y), workers=2, until=Stop(updates=3))
    with Hub(Mine(), run=tempfile.mkdtemp(dir="."), bind="tcp://127.0.0.1:*"):
        pass

once()
first = left()
for _ in range(19):
    once()
while any(now > before for now, before in zip(left(), first)):
    time.sleep(0.05)  # the last hub's threads have been told to end; a leak would end the cell by its timeout
print(True)
""",
}


class Client(nbclient.NotebookClient):
    """Presses the stop button when the cell `interrupt` has made twenty versions."""

    def process_message(self, message, cell, cell_index):
        content = message["content"]
        if cell.id == "interrupt" and "version 20" in content.get("text", ""):
            self.pressed = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(message, cell, cell_index)


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")


def test_a_notebook(tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    for name, value in {"TMPDIR": str(tmp_path / "t"), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook()
    for name, source in CELLS.items():
        cell = nbformat.v4.new_code_cell(source.strip(), id=name)
        cell.metadata["tags"] = ["raises-exception"] * (name == "interrupt")
        notebook.cells.append(cell)
    Client(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {cell.id: text_of(cell).splitlines() for cell in notebook.cells}
    assert said["train"][:2] == ["version 10", "version 20"], "told while the call blocks"
    assert said["look"] == ["1 ['layer0.bias', 'layer0.weight']", "stopping"]
    assert notebook.cells[list(CELLS).index("interrupt")].outputs[-1]["ename"] == "KeyboardInterrupt"
    assert [said[name][-1] for name in ("train", "live", "resume", "processes", "repeat")] == ["True"] * 5
    assert not [*(tmp_path / "t").iterdir()]
