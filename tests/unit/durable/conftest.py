"""Fixtures of the tests of `durable`."""

import pytest

from tests.support.parts.failing_disk import FailingDisk


@pytest.fixture
def disk():
    return FailingDisk()
