"""Fixtures of the tests of the cores."""

import pytest

from tests.support.parts.hub_bench import HubBench


@pytest.fixture
def hub_bench():
    return HubBench
