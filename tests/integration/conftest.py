"""Fixtures of the tests with real processes."""

import pytest

from tests.integration.processes import Commands


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path) as commands:
        yield commands
