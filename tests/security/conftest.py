"""Fixtures of the tests of keys: commands in a folder of their own, and a hub's folder of keys."""

import pytest

from edgeasync.durable.keys import HubKeys
from tests.support.programs.processes import Commands


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path, forks=True) as commands:
        yield commands


@pytest.fixture
def keys(tmp_path):
    return HubKeys.init(tmp_path / "keys")
