"""A device's limits: which are refused, and that each reaches the core as it was set."""

import pytest

from edgeasync.config import convert
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.errors import ConfigError


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"bytes_per_day_max": "100 kB"}, "bytes_per_day_max must be from 128 KiB"),
        ({"bytes_per_day_max": 2**63}, "to 9007199 GB"),
        ({"delay_steps": 9, "local_steps_max": 8}, r"delay_steps \(9\) must be at most local_steps_max \(8\)"),
    ],
)
def test_a_limit_that_no_device_can_keep_is_refused(limits, told):
    with pytest.raises(ConfigError, match=told):
        convert(limits, DeviceLimits, where="agent")
