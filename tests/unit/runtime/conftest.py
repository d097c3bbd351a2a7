"""Fixtures of the tests of `runtime`."""

import pytest

from edgeasync.net.network import ZmqNetwork


@pytest.fixture
def network():
    network = ZmqNetwork()
    yield network
    network.close()
