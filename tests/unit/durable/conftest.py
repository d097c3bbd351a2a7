"""Fixtures of the tests of this folder."""

import pytest

from tests.support.parts.failing_disk import FailingDisk


@pytest.fixture
def disk():
    return FailingDisk()
