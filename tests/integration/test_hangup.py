"""A terminal that is closed ends what runs on it as SIGTERM does: with a goodbye, and with everything saved."""

import json
import os
import signal
import subprocess
import sys

import pytest

from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import load_model
from tests.support.programs.processes import MODEL, PATIENCE_S, environment, trained

pytestmark = pytest.mark.process

ON_A_TERMINAL = """
import fcntl, os, sys, termios
terminal = int(sys.argv[1])
os.setsid()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.execv(sys.executable, [sys.executable, "-m", "edgeasync", *sys.argv[2:]])
"""


def test_a_hub_whose_terminal_is_closed_saves_its_model(commands):
    """Nothing can be printed then, not even that it has stopped."""
    master, terminal = os.openpty()
    arguments = [sys.executable, "-c", ON_A_TERMINAL, terminal, "hub", commands.settings(), "--json"]
    hub = subprocess.Popen(
        [str(argument) for argument in arguments],
        cwd=commands.folder,
        env=environment(commands.folder),
        pass_fds=(terminal,),
    )
    os.close(terminal)
    try:
        with os.fdopen(master) as screen:
            listening = next(event for event in map(json.loads, screen) if event["event"] == "listening")
            agent = commands.agent(listening["detail"], "pi")
            before = trained(listening["detail"], 10, "pi")
        assert hub.wait(PATIENCE_S) == 0
    finally:
        hub.kill()
        hub.wait()
    agent.wait_for("disconnected", detail="the hub is stopping")
    saved = load_model(commands.folder / "run-hub" / MODEL_FILE, MODEL.spec)[1]
    assert saved >= before["version"] > 0


def test_what_is_to_outlive_its_terminal_does(commands):
    """As `nohup` starts it: with SIGHUP ignored."""
    hub, address = commands.hub(commands.settings(), under=("nohup",))
    agent = commands.agent(address, "pi", under=("nohup",))
    trained(address, 3, "pi")
    for command in (agent, hub):
        command.signal(signal.SIGHUP)
    trained(address, 10, "pi")
    for command in (agent, hub):
        assert "stopped" not in command.names()
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
