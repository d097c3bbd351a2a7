"""Errors about an unknown command, flag or file suggest the right one, and never an unrelated one."""

import os
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from edgeasync.cli.main import app
from edgeasync.config import find_near, find_tables
from edgeasync.runtime.hub_settings import HubSettings
from tests.support.programs.command_line import ADDRESS, CONFIG, mistake, run_command
from tests.support.programs.processes import Commands

COMMANDS = get_command(app).commands

MISTAKES = {
    "stats": "no such command 'stats'; did you mean status?",
    "agnet": "no such command 'agnet'; did you mean agent?",
    "keys lst": "no such command 'lst'; did you mean list?",
    "start": "no such command 'start'; see 'edgeasync --help'",
    "hub --lease-s 5": "no such option: --lease-s; 'lease_s' is a key of [liveness] in the settings file",
    "hub --liveness 5": "no such option: --liveness; 'liveness' is a table in the settings file",
    "peer --batch-size 5": "no such option: --batch-size; 'batch_size' is a key of [local] in the settings file",
    "agent --topology ring": "no such option: --topology; it is a flag of 'edgeasync peer'",
    "peer --steps 5": "no such option: --steps; did you mean --steps-max?",
    "hub --file m": "no such option: --file; use --model",
    "agent --bandwidth-max 5": "no such option: --bandwidth-max; did you mean --bandwidth-bytes-per-s-max?",
    "agent --lease 5": "no such option: --lease; see 'edgeasync agent --help'",
    "hub --modl m": "no such option: --modl; did you mean --model?",
    "hub --seed x": "--seed: ",
    "demo --devices 1": "--devices: ",
    "replay --until": "option '--until' requires an argument",
    "hub a b": "got unexpected extra argument(s) (b); see 'edgeasync hub --help'",
    "export": "missing argument 'run'; see 'edgeasync export --help'",
    "hub --bind localhost --model m": "bind (--bind): 'localhost' is not an address; use tcp://HOST:PORT",
    "status --hub localhost": "hub (--hub): 'localhost' is not an address; use tcp://HOST:PORT",
}
"""Red before: typer printed four lines, and an address did not name its flag."""


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_in_a_command_line_is_told_in_one_line(tmp_path, line):
    told = run_command(tmp_path, *line.split())
    (sentence,) = told.stderr.splitlines()
    assert sentence.startswith(f"edgeasync: {MISTAKES[line]}")
    assert told.returncode == (ADDRESS if "is not an address" in sentence else CONFIG)


@pytest.mark.parametrize("line", ["hub --model m.onnx", "agent --data d.npz", "model check m.onnx"])
def test_a_working_directory_that_was_deleted_is_told_in_a_line(tmp_path, line):
    """Red before: a traceback."""
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f'cd "{folder}" && rmdir "{folder}" && exec {sys.executable} -m edgeasync {line}'
    done = subprocess.run(
        ["sh", "-c", command],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    (told,) = done.stderr.splitlines()
    assert told.startswith("edgeasync: ")
    assert done.returncode == CONFIG


@pytest.mark.parametrize("command", ["hub", "agent", "peer", "doctor"])
def test_another_file_in_the_place_of_the_settings(tmp_path, command):
    with Commands(tmp_path) as commands:
        flags = {"m.onnx": "--model"} | ({} if command == "hub" else {"d.npz": "--data", "d.csv": "--data"})
        for file, flag in flags.items():
            mistake(commands, CONFIG, f"use {flag} {file}", arguments=[command, file])


WORDS = st.text(string.ascii_lowercase + "-", min_size=5, max_size=12)


@given(WORDS, st.data())
def test_one_wrong_letter_behind_the_first_is_found(word, data):
    place = data.draw(st.integers(1, len(word) - 2))
    letter = data.draw(st.sampled_from(string.ascii_lowercase))
    wrong = data.draw(st.sampled_from([
        word[:place] + word[place + 1 :],
        word[:place] + letter + word[place:],
        word[:place] + letter + word[place + 1 :],
        word[:place] + word[place + 1] + word[place] + word[place + 2 :],
    ]))  # fmt: skip
    assert word in find_near(wrong, ["zzzzzzzzzzzz", word])


def test_no_command_is_offered_for_another():
    for name in COMMANDS:
        assert find_near(name, [other for other in COMMANDS if other != name]) == []


def test_a_key_is_found_in_kinds_and_lists():
    assert "policy.staleness" in find_tables("staleness_max", HubSettings)
    assert "policy.optimizer" in find_tables("learning_rate", HubSettings)
    assert find_tables("no_such_key", HubSettings) == []
