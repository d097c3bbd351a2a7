"""Fixtures of the tests of `ops.service`."""

import pytest

from edgeasync.ops.service.environments import Environments


@pytest.fixture
def environments(tmp_path):
    for number in (1, 2):
        (tmp_path / f"env-{number}/bin").mkdir(parents=True)
    (tmp_path / "current").symlink_to("env-2")
    return Environments(tmp_path)
