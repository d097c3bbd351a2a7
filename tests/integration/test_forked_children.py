"""A program that forked is killed: its restart works at once, although its children live."""

import socket
import subprocess
import sys

import numpy as np
import pytest

from edgeasync import Hub, fetch_status
from tests.support.programs.processes import PATIENCE_S, free_address

pytestmark = pytest.mark.process

BEGIN = """
import os, sys
import numpy as np
from edgeasync import Agent, Hub, fetch_status, join
folder, address = sys.argv[1:]
model = {"w": np.zeros(3, np.float32)}
def fork():
    print("begun", flush=True)
    input()
    if not os.fork():
        print("forked", flush=True)
        os.close(1)
        sys.stdin.read()  # up to the test's end
        os._exit(0)
"""

PROGRAMS = {
    "hub": "hub = Hub(model, run=folder, bind=address).start(); fetch_status(address); fork(); hub.wait()",
    "join": "s = join(address, model, state=folder, name='d'); fork()\nwhile s.step() is None: model['w'] += 1",
    "agent": (
        "agent = Agent(address, (np.eye(4), [0, 1, 0, 1]), state=folder, name='d').start()\nfork(); agent.wait()"
    ),
}


@pytest.fixture
def start(tmp_path):
    """Start a program; return it once it has begun."""
    running = []

    def begin(name, address):
        command = [sys.executable, "-c", BEGIN + PROGRAMS[name], str(tmp_path / name), address]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout.readline() == "begun\n"
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def fork_and_die(program):
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "forked\n"
    program.kill()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_program_restarts_although_its_child_lives(tmp_path, start, name):
    address = free_address()
    if name == "hub":
        fork_and_die(start(name, address))
        start(name, address)
        return
    with Hub({"w": np.zeros(3, np.float32)}, run=tmp_path / "run", bind=address):
        fork_and_die(start(name, address))
        start(name, address)


def test_a_killed_hub_ends_its_connections_although_its_child_lives(start):
    address = free_address()
    hub = start("hub", address)
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.recv(64)  # the greeting: libzmq has accepted it
        fetch_status(address)  # and so has the hub, by now
        fork_and_die(hub)
        assert connection.recv(64) == b""


CHILD = """
with Hub(model, run=folder, bind=address) as hub, join(hub.address, model) as session:
    if not (child := os.fork()):
        print(session.finished, hub.wait(), flush=True)
        sys.exit(4)  # through both `with`
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), hub.status()["version"], session.connected)
"""


def test_in_a_forked_child_nothing_of_its_parent_runs(tmp_path):
    command = [sys.executable, "-c", BEGIN + CHILD, str(tmp_path / "run"), free_address()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == ["True it runs in the process that forked this one", "4 0 True"]
