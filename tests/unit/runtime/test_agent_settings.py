"""Settings of an agent: caps on traffic."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSettings


@pytest.mark.parametrize(("said", "bytes_per_s"), [("1 MB", 1_000_000), (16_384, 16_384), ("0.5 MiB", 1 << 19)])
def test_a_cap_on_traffic_is_a_size(said, bytes_per_s):
    table = {"limits": {"bandwidth_bytes_per_s_max": said}}
    assert convert(table, AgentSettings, where="it").limits.bandwidth_bytes_per_s_max == bytes_per_s


@pytest.mark.parametrize("said", ["16 kB", 0, 16_383])
def test_a_cap_under_which_nothing_would_move_is_refused(said):
    with pytest.raises(ConfigError, match="at least 16 KiB"):
        convert({"limits": {"bandwidth_bytes_per_s_max": said}}, AgentSettings, where="it")


@pytest.mark.parametrize("said", ["fast", "1 MB/s", True, -1, 1.5])
def test_a_cap_that_is_no_size_is_refused(said):
    with pytest.raises(ConfigError):
        convert({"limits": {"bandwidth_bytes_per_s_max": said}}, AgentSettings, where="it")
