"""`edgeasync policies` as a process: what scripts read, and the one line for a kind that is none."""

import json

import pytest

from tests.support.programs.command_line import CONFIG, mistake

pytestmark = pytest.mark.process


def test_scripts_read_every_kind(commands):
    told = commands.run("policies", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    kinds = json.loads(told.stdout)
    assert {"staleness", "aggregate", "optimizer", "frequency"} <= {kind["part"] for kind in kinds}


def test_people_read_what_a_pipe_takes(commands):
    told = commands.run("policies")
    assert (told.returncode, told.stderr) == (0, "")
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert "\x1b" not in told.stdout


def test_a_kind_that_is_none(commands):
    mistake(commands, CONFIG, "'polynomials'", "did you mean polynomial", arguments=["policies", "polynomials"])
    mistake(commands, CONFIG, "'xyzzy'", "edgeasync policies", arguments=["policies", "xyzzy", "--json"])
