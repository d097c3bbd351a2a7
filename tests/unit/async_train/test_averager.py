"""Rank and world size of an averager."""

import pytest

from edgeasync.async_train import AsyncModelAverager, nn
from edgeasync.errors import ConfigError


@pytest.mark.parametrize("given", [{}, {"world_size": 4}, {"rank": 2}, {"rank": 2, "world_size": 4}])
def test_an_averager_has_its_place_from_the_environment_or_from_arguments(monkeypatch, given):
    environment = {"RANK": "2", "WORLD_SIZE": "4"} if not given else {"RANK": "2"} if "rank" not in given else {}
    environment |= {} if "world_size" in given or not given else {"WORLD_SIZE": "4"}
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    averaging = AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), **given).communication
    assert averaging._session_arguments["name"].startswith("rank-2-")
    assert averaging._world_size == 4
    assert averaging._hub_arguments is None, "rank 0 has the hub"


def test_a_rank_beyond_the_world_size_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="rank is 3, but world_size is 3"):
        AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), world_size=3)
