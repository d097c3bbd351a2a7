"""docs/settings/index.md names every key with its true default and bounds; every settings file we ship is read."""

import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer
from msgspec import inspect

from edgeasync import nn
from edgeasync.cli.main import app
from edgeasync.config import FilePath, Section, convert, kinds_of, read_toml
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.hub_start import make_hub
from edgeasync.runtime.peer_settings import PeerSection, PeerSettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "settings/index.md").read_text(encoding="utf-8")
FILES = {"A hub's file": HubSettings, "An agent's file": AgentSettings, "A peer's file": PeerSettings}

HUB_FILES = ["examples/hub.toml"]
AGENT_FILES = ["examples/agent.toml", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("devices/*.toml"))]


def structs_within(kind):
    """Return the struct types that a type speaks of: a table, a union of kinds, a list of them."""
    return within(kind, inspect.StructType)


def within(kind, wanted):
    """Return the types of a sort that a type is made of, whatever it is described by."""
    if isinstance(kind := kinds_of(kind), inspect.Metadata):
        return within(kind.type, wanted)
    if isinstance(kind, wanted):
        return [kind]
    inner = [*getattr(kind, "types", ()), *filter(None, [getattr(kind, "item_type", None)])]
    return [found for part in inner for found in within(part, wanted)]


def walk(struct, path, heading, found):
    """Gather every table of a settings file under the heading that documents it."""
    found[heading] = struct
    for field in struct.fields:
        for inner in structs_within(field.type):
            place = f"{path}.{field.name}".lstrip(".")
            if inner.tag is None:
                walk(inner, place, f"`[{place}]`", found)
            else:
                name = "`[model]`" if field.name == "model" else f"`{field.name}`"
                walk(inner, place, f'{name}, `kind = "{inner.tag}"`', found)
    return found


TABLES = {}
for top, settings in FILES.items():
    walk(inspect.type_info(settings), "", top, TABLES)


def rows(heading):
    """Return key -> (type, default, meaning) of the table under a heading."""
    parts = re.split(rf"^#+ {re.escape(heading)}$", TEXT, maxsplit=1, flags=re.MULTILINE)
    assert len(parts) == 2, f"docs/settings/index.md has no heading {heading!r}"
    rest = parts[1]
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    table = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {key: tuple(cells) for key, *cells in table}


every_table = pytest.mark.parametrize("heading", TABLES)


@every_table
def test_every_key_is_in_its_table_in_order(heading):
    """The keys of each struct are in its order; those that it inherits may be among its own."""
    keys, struct = list(rows(heading)), TABLES[heading].cls
    assert sorted(keys) == sorted(struct.__struct_fields__)
    for base in struct.__mro__:
        own = [key for key in getattr(base, "__annotations__", ()) if key in struct.__struct_fields__]
        assert [key for key in keys if key in own] == own


@every_table
def test_defaults_are_the_codes(heading):
    table = rows(heading)
    for field in msgspec.structs.fields(TABLES[heading].cls):
        cell = table[field.name][1]
        if field.required:
            assert cell == "required", field.name
        elif field.default is None or field.default is msgspec.UNSET:
            assert cell == "none", field.name
        elif isinstance(field.default, Section) and field.default.__struct_config__.tag is None:
            assert cell == "defaults", field.name
            assert field.default == type(field.default)()
        else:
            value = tomllib.loads(f"value = {cell.strip('`')}")["value"]
            default = FilePath.parse(field.default) if isinstance(field.default, FilePath) else field.default
            assert convert(value, field.type, where=heading) == default, field.name


@every_table
def test_bounds_stand_beside_the_type(heading):
    table = rows(heading)
    for field in TABLES[heading].fields:
        said = table[field.name][0].replace(" ", "")
        for kind in within(field.type, inspect.IntType | inspect.FloatType):
            for limit in ("ge", "gt", "le", "lt"):
                value = getattr(kind, limit)
                assert value is None or written(value) in said, (field.name, limit)
            assert re.findall(r"over(\d+)", said) == ([] if kind.gt is None else [written(kind.gt)]), field.name
            assert ("under" in said) == (kind.lt is not None), field.name


@every_table
def test_choices_stand_beside_the_type(heading):
    table = rows(heading)
    for field in TABLES[heading].fields:
        for kind in within(field.type, inspect.LiteralType):
            if said := re.findall(r'`"(\w+)"`', table[field.name][0]):
                assert sorted(said) == sorted(kind.values), field.name
            else:  # names of kinds that need no table, listed with the meaning
                assert set(kind.values) <= set(re.findall(r"`(\w+)`", table[field.name][2])), field.name


def written(value):
    if value != int(value):
        return f"{value:g}"
    return {2**62: "2⁶²", 2**24: "2²⁴"}.get(value, str(int(value)))


def test_the_walk_finds_what_it_must():
    assert {"`[hub.stop]`", '`optimizer`, `kind = "sgd"`', '`[model]`, `kind = "mlp"`', "`[agent]`"} <= set(TABLES)
    assert {"`[policy.monitor]`", '`detectors`, `kind = "loss"`', '`aggregate`, `kind = "quorum"`'} <= set(TABLES)
    headings = set(re.findall(r"^#{2,} (.+)$", TEXT, re.MULTILINE))
    assert headings - set(TABLES) == {"A whole hub's file", "A whole agent's file", "A whole peer's file"}


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        ("hub", ["`[hub]`", "`[checkpoint]`", '`[model]`, `kind = "onnx"`']),
        ("agent", ["`[agent]`"]),
        ("peer", ['`[model]`, `kind = "onnx"`', "`[peer]`"]),
    ],
)
def test_flags_are_named_with_their_keys(command, headings):
    table = {key: cells for heading in headings for key, cells in rows(heading).items()}
    parameters = typer.main.get_command(app).commands[command].params
    flags = {parameter.name: parameter.opts[-1] for parameter in parameters if parameter.opts[-1].startswith("--")}
    assert flags.pop("json") == "--json"
    assert flags.pop("log_level") == "--log-level"  # no setting either
    flags.pop("resume", None)  # in place of a file
    flags.pop("check", None)  # in place of a run
    flags.pop("trust_code", None)  # for one start: no file may say it
    for key, flag in flags.items():
        assert f"lag `{flag}`" in table[key][2]
    assert {key for key, cells in table.items() if "lag `--" in cells[2]} == set(flags)


@pytest.mark.parametrize(("table", "section"), [("agent", AgentSection), ("peer", PeerSection)])
def test_the_keys_of_a_device_that_are_no_flags_are_named(table, section):
    flags = {parameter.name for parameter in typer.main.get_command(app).commands[table].params}
    said = re.search(rf"very key of `\[{table}\]`(?: is a flag too)?, except ([^.]*)\.", TEXT)[1]
    assert set(re.findall(r"`(\w+)`", said)) == set(section.__struct_fields__) - flags


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Be in a folder with the files that the settings of hubs name."""
    monkeypatch.chdir(tmp_path)
    nn.save(nn.Linear(64, 10), "digits-cnn.onnx", input_shape=(64,))
    Path("digits").mkdir()
    np.savez("digits/held-out.npz", x=np.zeros((4, 64), np.float32), y=np.arange(4))


def test_whole_files_in_the_document_are_read(beside):
    hub, agent, peer = re.findall(r"```toml\n(.+?)```", TEXT, re.DOTALL)
    make_hub(convert(tomllib.loads(hub), HubSettings, where="the document"))
    convert(tomllib.loads(agent), AgentSettings, where="the document")
    convert(tomllib.loads(peer), PeerSettings, where="the document")
    assert tomllib.loads(hub)["model"] == tomllib.loads(agent)["model"]


@pytest.mark.parametrize("path", HUB_FILES)
def test_hub_files_are_read(path, beside):
    make_hub(read_toml(ROOT / path, HubSettings))


@pytest.mark.parametrize("path", AGENT_FILES)
def test_agent_files_are_read(path):
    assert read_toml(ROOT / path, AgentSettings).agent.hub is not None


def test_every_kind_of_device_has_its_file():
    assert {Path(path).stem for path in AGENT_FILES} >= {"raspberry-pi", "jetson", "laptop"}
