"""Fixtures of the tests of `runtime`."""

import pytest

from edgeasync.net.network import Network


@pytest.fixture
def network():
    network = Network()
    yield network
    network.close()
