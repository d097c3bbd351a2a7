"""Rank and world size of an averager."""

import pytest

from edgeasync.async_train import AsyncModelAverager, nn
from edgeasync.errors import ConfigError


@pytest.mark.parametrize("given", [{}, {"world_size": 4}, {"rank": 2}, {"rank": 2, "world_size": 4}])
def test_an_averager_has_its_place_from_the_environment_or_from_arguments(monkeypatch, given):
    for name in {"rank", "world_size"} - given.keys():
        monkeypatch.setenv(name.upper(), "2" if name == "rank" else "4")
    averaging = AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), **given).communication
    assert averaging._session_arguments["name"].startswith("rank-2-")
    assert averaging._world_size == 4
    assert averaging._hub_arguments is None, "rank 0 has the hub"


def test_a_rank_beyond_the_world_size_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="rank is 3, but world_size is 3"):
        AsyncModelAverager(nn.Sequential(nn.Linear(4, 2)), world_size=3)
