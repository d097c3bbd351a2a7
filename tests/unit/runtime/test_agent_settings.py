"""Settings of an agent: caps on traffic."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSettings


@pytest.mark.parametrize("said", ["16 kB", 0, 16_383])
def test_a_cap_under_which_nothing_would_move_is_refused(said):
    with pytest.raises(ConfigError, match="at least 16 KiB"):
        convert({"limits": {"bandwidth_bytes_per_s_max": said}}, AgentSettings, where="it")
