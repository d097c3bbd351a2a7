"""`edgeasync hub --check`: the most memory that a hub may need, and whether this machine has it."""

import json

import pytest

from edgeasync.core.hub.settings import Limits
from edgeasync.host.host_info import memory_bytes, memory_limit_bytes
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.runtime.memory import most_memory
from tests.support.programs.command_line import CAPACITY, assert_told
from tests.support.programs.processes import Commands

MIB = 1 << 20


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path) as commands:
        yield commands


def test_the_parts_are_told_and_nothing_is_touched(commands):
    settings = commands.settings(bind="tcp://127.0.0.1:1", more="[limits]\ndevices_max = 20\n")
    told = commands.run("hub", settings, "--check", "--json")
    assert told.returncode == 0, told.stderr
    checked = json.loads(told.stdout)
    assert checked["event"] == "checked"
    assert sum(checked["parts"].values()) == checked["bytes"] <= checked["machine_bytes"]
    assert checked["connections"] == 20 <= checked["connections_that_fit"]
    assert [path.name for path in commands.folder.iterdir()] == ["hub.toml"]
    shown = commands.run("hub", settings, "--check")
    assert shown.returncode == 0
    for name in checked["parts"]:
        assert f"\n{name} " in shown.stdout


def test_a_machine_that_is_too_small_is_told(commands):
    settings = commands.settings(more="[limits]\nupdates_held_max = 1_000_000_000_000\n")
    assert_told(commands.run("hub", settings, "--check", "--json"), CAPACITY, "MiB", "lower limits.")


def test_a_thousand_devices_and_a_model_of_a_megabyte_fit_into_a_gibibyte():
    spec = ParameterSpec((Parameter("weights", (250_000,)),))
    settings = RunSettings(hub=HubSection(history_rows_max=0), limits=Limits(devices_max=1_000))
    parts = most_memory(spec, settings, evaluated=True)
    others = sum(part.nbytes for part in parts if part.name != "process")
    assert others + 150 * MIB < 1 << 30
    small = RunSettings(
        hub=HubSection(durability="checkpoint", history_rows_max=0),
        limits=Limits(devices_max=10, updates_held_max=8, snapshots_max=4),
    )
    less = most_memory(spec, small, evaluated=False)
    assert sum(part.nbytes for part in less) < sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/service/hub", {"service/memory.max": "1048576", "service/hub/memory.max": "max"}),
        ("5:cpu,memory:/hub", {"memory/hub/memory.limit_in_bytes": "1048576"}),
    ],
    ids=["second version", "first version"],
)
def test_the_limit_of_a_cgroup_counts_and_of_those_around_it(tmp_path, cgroup, files):
    assert memory_limit_bytes(tmp_path) == memory_bytes()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{cgroup}\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert memory_limit_bytes(tmp_path) == 1 << 20
