"""Bundles of wheels for a board."""

from itertools import pairwise
from pathlib import Path

import pytest

from edgeasync.ops.service import bundle
from edgeasync.ops.service.bundle import download_arguments, make_bundle


@pytest.mark.parametrize(
    ("platform", "newest", "never"), [("pi", 36, "x86_64"), ("jetson", 35, "_2_36"), ("x86", 36, "aarch64")]
)
def test_a_bundle_takes_wheels_of_the_board_alone(platform, newest, never):
    arguments = download_arguments(platform, "3.12")
    tags = [after for word, after in pairwise(arguments) if word == "--platform"]
    assert f"_2_{newest}_" in tags[0]
    assert not [tag for tag in tags if never in tag]
    assert "--only-binary=:all:" in arguments
    assert "cp312" in arguments


def test_a_clone_in_this_folder_is_taken_for_no_name_in_an_index(tmp_path, monkeypatch):
    """pip takes a bare word for a name, and the clone is called as the package is."""
    commands = []

    def run(command):
        commands.append(command)
        if "wheel" in command:
            Path(command[-2], "edgeasync-0.1.0-py3-none-any.whl").touch()
        else:
            Path(command[command.index("--dest") + 1]).mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(bundle, "run_told", run)
    monkeypatch.chdir(tmp_path)
    make_bundle("edgeasync", "pi", "3.13", Path("from-index"))
    (tmp_path / "edgeasync").mkdir()
    make_bundle("edgeasync", "pi", "3.13", Path("from-clone"))
    assert [command[-1] for command in commands if "wheel" in command] == [
        "edgeasync",
        str(tmp_path / "edgeasync"),
    ]
