"""Settings in force as `edgeasync settings` prints them, and the schemas that editors check files by."""

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from edgeasync.cli.output import Printer
from edgeasync.cli.settings import FILES, print_settings, schema_of
from edgeasync.config import convert
from edgeasync.errors import ConfigError

ROOT = Path(__file__).parents[3]
HUB = """
[hub]
bind = "tcp://0.0.0.0:5555"
insecure = true
stop = { minutes = 5 }

[model]
kind = "softmax"
inputs = 4
classes = 3

[limits]
piece_bytes = "64 KiB"
"""


@pytest.fixture
def shown(tmp_path, capsys):
    """Return what is printed of a file."""

    def show(text, *, kind=None, changed=False):
        path = tmp_path / "file.toml"
        path.write_text(text)
        print_settings(path, kind, Printer(json=True), changed=changed)
        return {(one["table"], one["key"]): one for one in json.loads(capsys.readouterr().out)}

    return show


def test_each_setting_has_its_value_its_default_and_where_it_comes_from(shown):
    found = shown(HUB)
    assert found["hub", "bind"] == {
        "table": "hub", "key": "bind", "value": "tcp://0.0.0.0:5555", "default": "tcp://127.0.0.1:5555",
        "source": "file", "changed": True,
    }  # fmt: skip
    assert found["hub.stop", "minutes"]["value"] == 5.0
    assert found["limits", "piece_bytes"]["value"] == "64 KiB"
    assert found["limits", "piece_bytes"]["default"] == "1 MiB"
    assert found["liveness", "lease_s"] | {"table": "", "key": ""} == {
        "table": "", "key": "", "value": 15.0, "default": 15.0, "source": "default", "changed": False,
    }  # fmt: skip


def test_what_follows_from_other_settings_is_shown_as_it_will_be(shown):
    found = shown(HUB)
    assert (found["policy", "trust"]["value"], found["policy", "trust"]["source"]) == ("open", "from [hub]")
    assert (found["hub", "quiet"]["value"], found["hub", "quiet"]["source"]) == (False, "from [hub]")


def test_only_what_is_changed_is_shown_if_asked_for(shown):
    assert ("liveness", "lease_s") not in shown(HUB, changed=True)
    assert shown("[agent]\nseed = 0\n", changed=True) == {}


@pytest.mark.parametrize("program", ["hub", "agent", "peer"])
def test_the_lines_are_a_settings_file_again(tmp_path, capsys, program):
    path = tmp_path / f"{program}.toml"
    path.write_text(HUB if program == "hub" else f"[{program}]\n")
    print_settings(path, None, Printer(json=False), changed=False)
    read = tomllib.loads(capsys.readouterr().out)
    convert(read, FILES[f"{program}.toml"], where="the lines")
    if program != "hub":
        return
    assert read["model"] == {"kind": "softmax", "inputs": 4, "classes": 3}
    assert read["limits"]["piece_bytes"] == "64 KiB"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HUB.replace("bind", "bimd"), "hub: unknown key `bimd`; did you mean bind?"),
        ("", "unclear which program reads this file; add --for hub or --for agent or --for peer"),
        ("[agent]\n[throtle]\n", "unknown key `throtle`; did you mean throttle?"),
        ("[agent]\n[local]\n", "unknown key `local`; the hub's settings file defines how devices train"),
        ("[agent]\nquiet_hours = '22:00-07:00'\n", "unknown key `quiet_hours`; it is a key of [throttle]"),
    ],
)  # fmt: skip
def test_a_mistake_is_told(shown, text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        shown(text)


def test_whose_file_it_is_can_be_said(shown):
    assert ("agent", "seed") in shown("", kind="agent")
    with pytest.raises(ConfigError, match="--for 'agnet' is not known; choose from hub, agent, peer"):
        shown("", kind="agnet")


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "examples").glob("*.toml")), *sorted((ROOT / "devices").glob("*.toml"))]
)
def test_files_that_we_ship_fit_their_schema(path):
    table = tomllib.loads(path.read_text())
    name = next(file for file in FILES if file.removesuffix(".toml") in table)
    jsonschema.validate(table, schema_of(FILES[name], name))


@pytest.mark.parametrize(
    "table",
    [
        {"agent": {"thread": 2}},
        {"agent": {"threads": 0}},
        {"agent": {"graph_bytes_max": "64 MiBs"}},
        {"agent": {"provider": "gpu"}},
        {"agnet": {}},
    ],
)
def test_a_schema_finds_mistakes(table):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(table, schema_of(FILES["agent.toml"], "agent.toml"))


def test_a_plugin_may_stand_where_kinds_do():
    table = tomllib.loads(HUB) | {"policy": {"staleness": {"kind": "my_package:Halving", "strength": 2}}}
    schema = schema_of(FILES["hub.toml"], "hub.toml")
    jsonschema.validate(table, schema)
    for wrong in ({"kind": "polynomial", "strength": 2}, {"kind": "polynomal"}):
        table["policy"]["staleness"] = wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table, schema)
