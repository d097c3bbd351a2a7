"""A board of 64-bit ARM, emulated, at size `nightly`: installed without a network, it joins a hub on x86."""

import time
from pathlib import Path

import pytest

from edgeasync.durable.keys import HubKeys
from tests.support.arm import EDGEASYNC, ArmSystem
from tests.support.processes import write_data
from tests.support.size import repetitions

pytestmark = pytest.mark.process

CLONE = Path(__file__).parents[2]

if repetitions("systems of ARM"):

    @pytest.mark.parametrize(
        ("suite", "python", "cpu"), [("bookworm", "3.11", "cortex-a53"), ("trixie", "3.13", "cortex-a76")]
    )
    def test_a_board_installs_from_a_stick_joins_and_comes_back(commands, suite, python, cpu):
        board = ArmSystem(commands.folder, suite, cpu)
        stick = board.root / "root/stick"
        told = commands.run("bundle", CLONE, "--platform", "pi", "--python", python, "--out", stick)
        assert told.returncode == 0, told.stderr
        board.run("sh", "/root/stick/install.sh", network=False)
        lines = board.run(EDGEASYNC, "doctor")
        for words in ("aarch64, 64 bits, Raspberry Pi 4", "CPU computes", "52 C (cpu-thermal)"):
            assert words in lines

        keys = HubKeys.init(commands.folder / "keys")
        settings = commands.settings(more="[liveness]\nheartbeat_s = 2\nlease_s = 60\n")
        _, address = commands.hub(settings, "--keys", commands.folder / "keys")
        write_data(board.root / "root/readings.npz")
        arguments = (
            "agent",
            "--data",
            "/root/readings.npz",
            "--device-id",
            "pi-1",
            "--state",
            "/root/state",
            "--json",
        )
        token = keys.issue_token("pi-1", (address,), time.time()).text()
        agent = start(commands, board, *arguments, "--enrol", token)
        agent.wait_for("joined")
        assert agent.wait_for("progress")["updates_answered"]
        agent.kill()
        again = start(commands, board, *arguments)
        again.wait_for("started", detail="60 examples, start 2")
        again.wait_for("joined")
        assert again.wait_for("progress")["updates_answered"]


def start(commands, board, *arguments):
    """Start a command of the board's own edgeasync."""
    return commands.start(*arguments, under=board.enter(), python=EDGEASYNC, program=())
