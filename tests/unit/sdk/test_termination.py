"""SIGTERM ends a program with a hub in it like `sys.exit`: the last version is in the run's folder."""

import json
import signal
import subprocess
import sys

import pytest

from edgeasync import Run
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import read_model

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
from edgeasync import Agent, Hub
from edgeasync.training.numpy_models import SoftmaxModel

settings = {{"hub": {{"durability": {durability!r}}}}}
hub = Hub(SoftmaxModel(inputs=4, classes=2), run=sys.argv[1], bind="tcp://127.0.0.1:*", settings=settings)
{handler}
{start}
agent = Agent(hub.address, (np.eye(4), [0, 1, 0, 1])).start()
while hub.status()["version"] < 20:
    time.sleep(0.01)
agent.stop()
agent.wait(10)
status = hub.status()
print(json.dumps(status["version"] + bool(status["updates_buffered"])), flush=True)  # the end folds what waits
{child}
for _ in range(600):
    time.sleep(0.1)  # a signal just before a sleep does not end it
"""
CHILD = """
pid = os.fork()
if not pid:
    time.sleep(60)
    os._exit(1)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def program(folder, *, durability="checkpoint", start="hub.start()", handler="", child=""):
    code = PROGRAM.format(durability=durability, start=start, handler=handler, child=child)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.mark.process
@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
@pytest.mark.parametrize("start", ["hub.start()", "hub.__enter__()"])
def test_a_hub_that_is_terminated_writes_its_last_version(tmp_path, durability, start):
    with program(tmp_path / "run", durability=durability, start=start) as process:
        version = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert version >= 20
    assert read_model(tmp_path / "run" / MODEL_FILE).version == version
    assert Run.open(tmp_path / "run").version == version


@pytest.mark.process
def test_a_forked_child_dies_by_the_signal_and_harms_nobody(tmp_path):
    with program(tmp_path / "run", child=CHILD) as process:
        version = json.loads(process.stdout.readline())
        assert json.loads(process.stdout.readline()) == -signal.SIGTERM
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert read_model(tmp_path / "run" / MODEL_FILE).version == version


@pytest.mark.process
def test_a_signal_that_comes_during_a_fork_is_not_lost(tmp_path):
    handler = "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))"
    child = "import edgeasync.sdk.termination\nif not os.fork():\n    os._exit(0)"
    program_code = PROGRAM.format(durability="journal", start="hub.start()", handler="", child=child)
    code = f"import os, signal\n{handler}\n{program_code}"  # before edgeasync is imported: its hook comes first
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.process
def test_a_handler_of_the_program_is_left_alone(tmp_path):
    handler = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))"
    with program(tmp_path / "run", handler=handler) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 7
