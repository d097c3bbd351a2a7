"""Environments of a service."""

import json
from importlib.metadata import PathDistribution

import pytest

from edgeasync.errors import ConfigError, StorageError
from edgeasync.ops.service.environments import Environments, extras_of, install_arguments, own_source
from tests.support.parts.services import names


@pytest.mark.parametrize(
    ("kind", "packages", "extras"),
    [
        ("agent", (), ""),
        ("agent", ("onnx",), "hub"),
        ("agent", ("onnx", "onnxruntime-gpu"), "hub,gpu"),
        ("agent", ("starlette",), "web"),
        ("hub", (), "hub,web"),
    ],
)
def test_an_upgrade_keeps_what_the_environment_has(monkeypatch, kind, packages, extras):
    """A hub and an agent of one machine run from one environment."""
    monkeypatch.setattr("edgeasync.ops.service.environments.has_package", packages.__contains__)
    assert extras_of(kind) == extras


@pytest.mark.parametrize("fails", ["venv", "pip", "--version"])
def test_an_environment_that_cannot_be_made_leaves_nothing(environments, monkeypatch, fails):
    def run(command):
        (environments.home / "env-3").mkdir(exist_ok=True)
        if fails in command:
            raise StorageError(fails)

    monkeypatch.setattr("edgeasync.ops.service.environments.run_told", run)
    with pytest.raises(StorageError, match=fails):
        environments.make("edgeasync", "")
    assert names(environments) == ["current", "env-1", "env-2"]


def test_an_upgrade_needs_the_link_that_the_installer_makes(tmp_path):
    with pytest.raises(ConfigError, match=r"current: no such link"):
        _ = Environments(tmp_path).current


def test_how_pip_is_told_a_source(tmp_path):
    assert install_arguments("edgeasync==0.2", "hub") == ["edgeasync[hub]==0.2"]
    (tmp_path / "edgeasync-0.1.0-py3-none-any.whl").touch()
    assert install_arguments(str(tmp_path), "hub") == [
        "--no-index",
        "--find-links",
        str(tmp_path),
        "edgeasync[hub]",
    ]


@pytest.mark.parametrize("noted", [None, "{url}/gone", "https://example.org/edgeasync.whl", "{url}"])
def test_without_a_source_it_is_where_this_edgeasync_was_installed_from(tmp_path, monkeypatch, noted):
    """Never a name in an index: root runs what it brings."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    url = None if noted is None else json.dumps({"url": noted.format(url=clone.as_uri())})
    monkeypatch.setattr(PathDistribution, "read_text", lambda self, name: url)
    if noted == "{url}":
        assert own_source() == str(clone)
    else:
        with pytest.raises(ConfigError, match=r"the source of this edgeasync is unknown; pass a folder of wheels"):
            own_source()
