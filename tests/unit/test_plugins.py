"""Which code may be imported because the folder of a run names it."""

import sys
from importlib.metadata import EntryPoint

import pytest

from edgeasync import plugins
from edgeasync.config import to_table
from edgeasync.errors import ConfigError, PluginError
from edgeasync.plugins import Trust, find_code, find_policy, is_plugin, refuse_modules_in
from edgeasync.policies.kinds import plugins_named
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import plugin_parts
from tests.support.parts import sly_policies as sly

WEIGHT = f"{sly.__name__}:Weight"


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """A folder in which modules are searched."""
    monkeypatch.syspath_prepend(tmp_path / "run")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_REFUSED", set())
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("strange")]:
        del sys.modules[name]


def make(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from edgeasync.policies import Plugin\nclass Odd(Plugin, frozen=True): pass\n")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("strange.py", "strange:Odd"),
        ("strange/__init__.py", "strange:Odd"),
        ("strange/runs/x.py", "strange.runs.x:Odd"),
        ("strange/__init__.py", "strange.missing:Odd"),
    ],
)
@pytest.mark.parametrize("through", ["folder", "link"])
def test_no_module_of_a_runs_folder_is_imported(searched, file, name, through):
    make(searched / "kept" / file)
    if through == "link":
        (searched / file).parent.mkdir(parents=True, exist_ok=True)
        (searched / file).symlink_to(searched / "kept" / file)
        refuse_modules_in(searched / "kept")
    else:
        (searched / "kept").rename(searched / "run")
        refuse_modules_in(searched / "run")
    with pytest.raises(PluginError, match="is in the folder of a run, from which code is never imported"):
        find_code(name, "plugin")
    ran = [module for name, module in sys.modules.items() if name.startswith("strange")]
    assert not [module for module in ran if module.__file__ is not None], "folders that are packages run nothing"


def test_other_modules_and_missing_ones_are_as_before(searched):
    make(searched / "strange.py")
    refuse_modules_in(searched / "run")
    assert find_code("strange:Odd", "plugin").__name__ == "Odd"
    with pytest.raises(ConfigError, match="no module 'strange_missing'"):
        find_code("strange_missing:Odd", "plugin")


def test_an_installation_in_a_runs_folder_is_not_part_of_the_run(searched):
    refuse_modules_in("/")
    assert find_code("numpy:zeros", "plugin")


@pytest.mark.parametrize(
    ("trust", "kind", "found"),
    [
        (Trust(), WEIGHT, None),
        (Trust(), "odd", None),
        (Trust(known={WEIGHT: sly.Weight}), WEIGHT, sly.Weight),
        (Trust(known={WEIGHT: sly.Weight}), f"{sly.__name__}:Mean", None),
        (Trust(installed=True), "odd", sly.Single),
        (Trust(installed=True), f"{sly.__name__}:Single", sly.Single),
        (Trust(installed=True), WEIGHT, None),
        (Trust(installed=True), "pytest:main", None),
        (Trust(installed=True, code=True), WEIGHT, sly.Weight),
    ],
)
def test_who_is_trusted(monkeypatch, trust, kind, found):
    point = EntryPoint("odd", f"{sly.__name__}:Single", plugins.POLICIES)
    monkeypatch.setattr(plugins, "installed", lambda group: {"odd": point} if group == plugins.POLICIES else {})
    if found is not None:
        assert trust.find_policy(kind) is found
        return
    with pytest.raises(
        PluginError, match=r"only the run's folder names.* trust_code=True \(--trust-code\)"
    ) as told:
        trust.find_policy(kind)
    assert ("settings file" in str(told.value)) is trust.installed


def test_a_kind_that_is_no_plugins_is_left_to_others():
    assert not is_plugin("polynomial")
    assert Trust().find_policy("polynomial") is None
    assert find_policy("polynomial") is None


def test_plugins_of_a_policy_are_named_without_being_imported():
    assert plugins_named(to_table(Policy())) == []
    table = {
        "staleness": {"kind": "a:B"},
        "optimizer": [{"kind": "sgd"}, {"kind": "a.c:D"}],
        "monitor": {"detectors": [{"kind": "a:B"}]},
        "warm_up": {"aggregate": {"kind": "e:F"}},
    }
    assert plugins_named(table) == ["a:B", "a.c:D", "e:F"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("auto", []),
        ("top_k(0.01)+int8+zstd", []),
        ("own_bytes+zstd", ["own_bytes"]),
        ("top_k(0.1)+own_bytes", ["own_bytes"]),
    ],
)
def test_plugins_of_a_codecs_name(name, parts):
    assert plugin_parts(name) == parts
