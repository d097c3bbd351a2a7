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
from tests.support.programs.command_line import CONFIG, mistake, run_command
from tests.support.programs.processes import Commands

COMMANDS = get_command(app).commands

MISTAKES = {
    "stats": "No such command 'stats'. Did you mean status?",
    "agnet": "No such command 'agnet'. Did you mean agent?",
    "keys lst": "No such command 'lst'. Did you mean list?",
    "start": "No such command 'start'.",
    "serve": "No such command 'serve'.",
    "service uninstall": "No such command 'uninstall'.",
    "hub --lease-s 5": "No such option: --lease-s. 'lease_s' is a key of [liveness] in the settings file.",
    "hub --lease-s=5": "No such option: --lease-s. 'lease_s' is a key of [liveness] in the settings file.",
    "hub --liveness 5": "No such option: --liveness. 'liveness' is a table in the settings file.",
    "peer --batch-size 5": "No such option: --batch-size. 'batch_size' is a key of [local] in the settings file.",
    "agent --topology ring": "No such option: --topology. It is a flag of 'edgeasync peer'.",
    "agent --bind b": "No such option: --bind. It is a flag of 'edgeasync hub' and 'edgeasync peer'.",
    "peer --trainer t": "No such option: --trainer. It is a flag of 'edgeasync agent'.",
    "doctor --cpu-share 5": (
        "No such option: --cpu-share. 'cpu_share' is a key of [throttle] in the settings file."
    ),
    "peer --steps 5": "No such option: --steps. Did you mean --steps-max?",
    "hub --file m": "No such option: --file. Write --model.",
    "agent --bandwidth-max 5": "No such option: --bandwidth-max. Did you mean --bandwidth-bytes-per-s-max?",
    "agent --lease 5": "No such option: --lease.",
    "hub --kind X": "No such option: --kind.",
    "agent --kind X": "No such option: --kind.",
    "peer --kind X": "No such option: --kind.",
    "hub --modl m": "No such option: --modl. Did you mean --model?",
    "status --hubb h": "No such option: --hubb. Did you mean --hub?",
    "keys enrol --adress a": "No such option: --adress. Did you mean --address?",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_command_or_flag_that_there_is_not(tmp_path, line):
    told = run_command(tmp_path, *line.split())
    assert told.stderr.splitlines()[-1] == f"Error: {MISTAKES[line]}"
    assert told.returncode == CONFIG


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
            mistake(commands, CONFIG, f"write {flag} {file}", arguments=[command, file])


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
