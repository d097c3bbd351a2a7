"""Rank and world size, from the environment or from arguments."""

import pytest

from edgeasync import async_train
from edgeasync.async_train.distributed import find_master
from edgeasync.errors import ConfigError


def test_rank_and_world_size_come_from_the_environment_or_from_arguments(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
        monkeypatch.delenv(name)
    assert (async_train.init_distributed(), find_master()) == ((0, 1), "tcp://127.0.0.1:29500")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert async_train.distributed.init_distributed() == (2, 4)
    found = async_train.init_distributed(rank=1, world_size=2, master_addr="10.0.0.1", master_port=5001)
    assert (found, find_master()) == ((1, 2), "tcp://10.0.0.1:5001")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        async_train.init_distributed()
