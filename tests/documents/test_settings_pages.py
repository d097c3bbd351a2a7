"""docs/reference/settings shows every table of settings; every settings file that we print or ship is read."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from docs.generated import settings, settings_tables
from edgeasync import nn
from edgeasync.cli.settings import FILES
from edgeasync.config import convert, read_toml
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.hub_start import make_hub
from tests.support.pages.documents import ROOT

PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference/settings").glob("*.md"))
}
MARKED = [place for text in PAGES.values() for place in re.findall(r"<!-- generated: settings (\S+) -->", text)]
TABLES = settings_tables()
HUB_FILES = ["examples/hub.toml"]
AGENT_FILES = ["examples/agent.toml", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("devices/*.toml"))]


def test_every_table_that_has_keys_is_shown_once():
    shown = [TABLES[place] for place in MARKED]
    assert {struct for struct in TABLES.values() if struct.__struct_fields__} == set(shown)
    assert len(set(MARKED)) == len(MARKED)


def test_a_table_says_type_bounds_default_and_meaning():
    heartbeat = "| `heartbeat_s` | number, over 0 to 3,600 | `5.0` | Time between two pings that a device sends, "
    assert settings("hub:liveness").splitlines()[2].startswith(heartbeat)
    assert '| `piece_bytes` | size | `"1 MiB"` |' in settings("hub:limits")
    assert "| `hub` | table | defaults |" in settings("hub:")
    assert "| `model` | table | required |" in settings("hub:")
    assert '| `optimizer` | list of tables, 1 or more | `[{ kind = "sgd", learning_rate = 0.05 }]` |' in settings(
        "hub:local"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_of_a_table_has_its_table(page):
    """Kinds without keys have none."""
    for heading, body in re.findall(
        r"^## `\[([\w.]+)\]`\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL
    ):
        assert re.search(rf"generated: settings \w+:{re.escape(heading)} -->", body), heading


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Be in a folder with the files that the settings of hubs name."""
    monkeypatch.chdir(tmp_path)
    nn.save(nn.Linear(64, 10), "digits-cnn.onnx", input_shape=(64,))
    Path("digits").mkdir()
    np.savez("digits/held-out.npz", x=np.zeros((4, 64), np.float32), y=np.arange(4))


@pytest.mark.parametrize("name", FILES)
def test_whole_files_in_the_documents_are_read(beside, name):
    (text,) = re.findall(r"```toml\n(.+?)```", PAGES[name.removesuffix(".toml")], re.DOTALL)
    read = convert(tomllib.loads(text), FILES[name], where="the document")
    if isinstance(read, HubSettings):
        make_hub(read)


@pytest.mark.parametrize("path", HUB_FILES)
def test_hub_files_are_read(path, beside):
    make_hub(read_toml(ROOT / path, HubSettings))


@pytest.mark.parametrize("path", AGENT_FILES)
def test_agent_files_are_read(path):
    assert read_toml(ROOT / path, AgentSettings).agent.hub is not None


def test_every_kind_of_device_has_its_file():
    assert {Path(path).stem for path in AGENT_FILES} >= {"raspberry-pi", "jetson", "laptop"}
