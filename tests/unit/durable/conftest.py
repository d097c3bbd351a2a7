"""Fixtures of the tests of this folder."""

import pytest

from tests.support.failing_disk import FailingDisk


@pytest.fixture
def disk():
    return FailingDisk()
