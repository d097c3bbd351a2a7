"""docs/operate/events.md and docs/reference/json.md name what the code says, all of it and no more."""

import ast
import re
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest

import edgeasync
from docs.generated import (
    GENERATORS,
    MARK,
    PARTS,
    commands,
    every_command,
    exit_codes,
    policies,
    public_names,
    python,
)
from edgeasync.cli.demo import INTERRUPTED
from edgeasync.cli.main import app
from edgeasync.cli.outputs import EventLine
from edgeasync.cli.schemas import OUTPUTS
from edgeasync.core.device.effects import ReportName as AgentEvent
from edgeasync.core.hub.effects import ReportName as HubEvent
from edgeasync.core.peer.effects import ReportName as PeerEvent
from edgeasync.policies.catalogue import catalogue

ROOT = Path(__file__).parents[2]
EVENTS = (ROOT / "docs/operate/events.md").read_text("utf-8")
PRINTS = re.compile(r"(self\._)?printer\.(event|figures)")
JSON = (ROOT / "docs/reference/json.md").read_text("utf-8")


def first_cells(heading):
    """Return the first cells of the table under a heading, without the head."""
    section = re.split(r"\n## ", EVENTS.partition(f"\n## {heading}\n")[2], maxsplit=1)[0]
    return [cell.strip("` ") for cell in re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)][1:]


def printed(name):
    """Return event -> keys of every `printer.event`, or `printer.figures`, in a module of the command line."""
    tree = ast.parse((ROOT / f"edgeasync/cli/{name}.py").read_text("utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and PRINTS.fullmatch(ast.unparse(node.func)):
            event = node.args[0]
            if isinstance(event, ast.Constant):
                found.setdefault(event.value, set()).update(key.arg for key in node.keywords if key.arg)
    return found


@pytest.mark.parametrize(
    ("heading", "names", "module"),
    [("Events of a hub", HubEvent, "hub"), ("Events of an agent", AgentEvent, "agent")],
)
def test_every_event_has_its_row(heading, names, module):
    kept_quiet = {"answered"}  # run_agent prints none
    assert sorted(first_cells(heading)) == sorted({*get_args(names), *printed(module)} - kept_quiet)


def test_every_event_of_a_peer_has_its_row():
    kept_quiet = {"round_started", "round_done"}
    names = {*get_args(PeerEvent), *printed("peer")} - kept_quiet
    assert sorted(first_cells("Events of a peer")) == sorted(names)


def test_every_exit_code_has_its_row():
    codes = [0, *exit_codes(), INTERRUPTED]
    assert [int(code) for code in first_cells("Exit codes")] == codes
    assert sorted(map(int, re.findall(r"\d+", app.info.epilog))) == codes


def test_events_have_no_keys_that_the_schema_lacks():
    for module in ("hub", "agent", "peer"):
        for keys in printed(module).values():
            assert keys <= set(EventLine.__struct_fields__)


def test_every_output_is_on_the_page():
    shown = {name.partition(":")[0] for kind, name in MARK.findall(JSON) if kind == "output"}
    assert shown == set(OUTPUTS)


def test_every_mark_has_a_generator():
    used = {name for page in (ROOT / "docs").rglob("*.md") for name, _ in MARK.findall(page.read_text("utf-8"))}
    assert used == {*GENERATORS, *PARTS}


def test_generated_parts_name_all_there_is():
    for name, command in every_command():
        assert f"## `edgeasync {name}`" in commands()
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
    assert all(kind.example in policies() or kind.kind in policies() for kind in catalogue())
    described = re.findall(r"^### (.+)$", python(), re.MULTILINE)
    assert {id(attrgetter(name)(edgeasync)) for name in described} == {
        id(value) for value in public_names().values()
    }
    assert len(described) == len(set(described))
