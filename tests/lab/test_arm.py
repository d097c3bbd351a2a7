"""A board of 64-bit ARM, emulated, at size `nightly`: what it computes, sends and recovers is what x86 does."""

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from edgeasync.cli.demo import make_model, split_digits
from edgeasync.core.hub.events import PushArrived
from edgeasync.core.recovery.log import read_entry
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.keys import HubKeys
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import read_model
from tests.support.boards import recovered
from tests.support.boards.arm import EDGEASYNC, PYTHON, SUPPORT, ArmSystem
from tests.support.boards.codec_digests import GOLDEN
from tests.support.programs.processes import Commands, trained, until
from tests.support.size import repetitions

pytestmark = pytest.mark.process

CLONE = Path(__file__).parents[2]
RELEASES = {"bookworm": "3.11", "trixie": "3.13"}
INSTALLED_S = 600.0

DIGITS = """
[liveness]
heartbeat_s = 2
lease_s = 60
[local]
optimizer = [{ kind = "sgd", learning_rate = 0.1 }]
[policy]
frequency = { kind = "fixed", local_steps = 16 }
[codec]
push = "identity"
[checkpoint]
every = "10 hours"
"""

if repetitions("systems of ARM"):

    @pytest.fixture(scope="module", params=RELEASES.items(), ids=RELEASES)
    def board(request, tmp_path_factory):
        """A board with edgeasync, installed from a stick without a network; all test processes share it."""
        suite, python = request.param
        folder = tmp_path_factory.getbasetemp()
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        board = ArmSystem(folder / suite)
        with (folder / f"{suite}.lock").open("w") as lock, Commands(folder) as commands:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not board.at("installed").exists():
                board.make(suite)
                stick = board.at("/root/a stick")
                bundle = commands.start("bundle", CLONE, "--platform", "pi", "--python", python, "--out", stick)
                assert bundle.wait(INSTALLED_S) == 0, str(bundle)
                board.run("sh", "/root/a stick/install.sh", network=False)
                board.at("installed").touch()
        return board

    def test_the_doctor_knows_the_board(board):
        lines = board.run(EDGEASYNC, "doctor")
        for words in ("aarch64, 64 bits, Raspberry Pi 4", "CPU runs the model", "52 C (cpu-thermal)"):
            assert words in lines

    def test_an_agent_learns_digits_is_killed_and_comes_back(board, commands):
        keys = HubKeys.init(commands.folder / "keys")
        hub, address = commands.hub(digits(commands), "--keys", commands.folder / "keys")
        arguments = ("--device-id", "pi-1", *data_and_state(board, commands))
        token = keys.issue_token("pi-1", (address,), time.time()).text()
        agent = start(commands, board, "agent", *arguments, "--enrol", token, "--json")
        hub.wait_for("joined", device="pi-1")
        run = commands.folder / "run-hub"
        until(lambda: len(pushes(run)) >= 3, "updates")
        agent.kill()
        before = len(pushes(run))
        again = start(commands, board, "agent", *arguments, "--json")
        assert "start 2" in again.wait_for("started")["detail"]
        hub.wait_for("rejoined", device="pi-1")
        until(lambda: len(pushes(run)) >= before + 3, "updates after the return")
        losses = [push.loss_mean for push, _ in pushes(run)]
        assert losses[-1] < 0.8 * losses[0]

    def test_its_updates_are_those_of_x86(board, commands):
        def agent_there(address):
            of_board = data_and_state(board, commands)
            return start(commands, board, "agent", "--hub", address, "--device-id", "one", *of_board)

        def agent_here(address):
            return commands.agent(address, "one", data=write_digits(commands.folder / "same.npz"), step_s=0.0)

        (push, there), (push_here, here) = (
            first_update(commands, name, agent) for name, agent in (("there", agent_there), ("here", agent_here))
        )
        assert (push.local_steps, push.examples) == (push_here.local_steps, push_here.examples)
        assert push.loss_mean == pytest.approx(push_here.loss_mean, rel=1e-4)
        np.testing.assert_allclose(there, here, rtol=0.0, atol=1e-4 * np.abs(here).max())

    @pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a76"])
    def test_codecs_give_the_same_bits(board, cpu):
        other = ArmSystem(board.root.parent, cpu)
        found = json.loads(other.run(PYTHON, f"{SUPPORT}/codec_digests.py"))
        assert found == json.loads(GOLDEN.read_text("utf-8"))

    def test_a_journal_leads_to_the_same_bits_there_and_here(board, tmp_path):
        def there(word, runs):
            return json.loads(board.run(PYTHON, f"{SUPPORT}/recovered.py", word, runs))

        held = recovered.write(board.at(f"/root/{tmp_path.name}/of-x86"))
        assert recovered.read(board.at(f"/root/{tmp_path.name}/of-x86")) == held
        assert there("read", f"/root/{tmp_path.name}/of-x86") == held
        held = there("write", f"/root/{tmp_path.name}/of-arm")
        assert recovered.read(board.at(f"/root/{tmp_path.name}/of-arm")) == held

    def test_a_hub_resumes_a_run_of_x86_as_a_hub_here_does(board, commands):
        hub, address = commands.hub(commands.settings())
        for name in ("one", "two"):
            commands.agent(address, name)
        trained(address, 50)
        hub.kill()
        run = commands.folder / "run-hub"
        name = f"/root/{commands.folder.name}/run"
        copy = shutil.copytree(run, board.at(name))
        there = stopped(start(commands, board, "hub", "--resume", name, "--json"), copy)
        here = stopped(commands.start("hub", "--resume", run, "--json"), run)
        assert there == here
        assert here["version"] > 0


def start(commands, board, *arguments):
    """Start a command of the board's own edgeasync."""
    return commands.start(*arguments, under=board.enter(), python=EDGEASYNC, program=())


def data_and_state(board, commands):
    """Return where an agent of the board finds its digits and keeps its state, in a folder of this test's."""
    name = f"/root/{commands.folder.name}"
    board.at(name).mkdir()
    write_digits(board.at(f"{name}/digits.npz"))
    return "--data", f"{name}/digits.npz", "--state", f"{name}/state"


def write_digits(path):
    """Write a device's share of the digits; return the path."""
    part = split_digits(4, 0)[0][0]
    np.savez(path, x=part.x, y=part.y)
    return path


def digits(commands, name="hub"):
    """Return the settings of a hub that teaches the demo's network digits, always from the same values."""
    file = commands.folder / "digits-cnn.onnx"
    file.write_bytes(make_model(0))
    model = f'kind = "onnx"\nfile = "{file}"'
    return commands.settings(model=model, more=DIGITS, name=name)


def first_update(commands, name, start_agent):
    """Return what an agent makes of the first assignment of a hub of its own: the message and the values."""
    hub, address = commands.hub(digits(commands, name))
    agent = start_agent(address)
    trained(address, 1)
    agent.kill()
    hub.kill()
    return pushes(commands.folder / f"run-{name}")[0]


def stopped(hub, run):
    """Stop a hub that has resumed a run; return its version, its count, and the bytes of its model."""
    hub.wait_for("listening")
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0, str(hub)
    said, arrays = hub.wait_for("stopped"), read_model(run / MODEL_FILE).arrays
    model = {name: array.tobytes() for name, array in arrays.items()}
    return {"version": said["version"], "updates_applied": said["updates_applied"], "model": model}


def pushes(run):
    """Return all updates in a journal: messages and values."""
    found = []
    for record in JournalReading(FolderDisk(run), after=0).records():
        event = read_entry(record.entry).event
        if isinstance(event, PushArrived):
            found.append((event.push, np.frombuffer(bytes(record.payload), "<f4")))
    return found
