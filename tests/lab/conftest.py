"""Fixtures of the lab."""

import pytest

from tests.support.programs.processes import Commands


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path, forks=True) as commands:
        yield commands
