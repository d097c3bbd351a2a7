"""Settings of the hub's core: parsing of intervals, and errors for invalid combinations."""

import math

import pytest

from edgeasync.config import convert
from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings, parse_every
from edgeasync.errors import ConfigError


@pytest.mark.parametrize(
    ("every", "meant"),
    [
        ("1 update", (1, math.inf)),
        ("0.5 seconds", (math.inf, 0.5)),
        (" 10minutes ", (math.inf, 600)),
        ("1.5 hours", (math.inf, 5400)),
    ],
)
def test_how_often_is_a_number_of_updates_or_a_time(every, meant):
    assert parse_every(every) == meant
    settings = CheckpointSettings(every=every)
    assert (settings.every_updates, settings.every_s) == meant


@pytest.mark.parametrize(
    "every", ["", "often", "1", "-1 s", "1e3 updates", "1 day", "0 s", "1.5 updates", "9" * 400 + " s"]
)
def test_how_often_is_refused_if_it_is_neither(every):
    with pytest.raises(ValueError, match="every = "):
        parse_every(every)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"liveness": {"lease_s": 5.0}}, r"lease_s \(5\) must be longer than heartbeat_s \(5\)"),
        ({"limits": {"piece_bytes": "32 KiB"}}, "piece_bytes must be from 64 KiB to 16 MiB"),
        ({"codec": {"push": "off"}}, "devices must send updates"),
        ({"codec": {"model": "int8"}}, "cannot encode whole models; use one of"),
        ({"codec": {"delta": "auto"}}, "delta cannot be 'auto': all devices receive"),
        ({"stop": {"plateau": {}}}, "plateau needs a duration"),
        ({"checkpoint": {"every": "sometimes"}}, "write it as '1000 updates'"),
        (
            {"limits": {"bytes_per_day_max": "1 kB"}},
            "limits.bytes_per_day_max is 1000 bytes, but a device's pings",
        ),
        ({"limits": {"device_bytes_per_day_max": "1 kB"}}, "limits.device_bytes_per_day_max is 1000 bytes"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(table, words):
    with pytest.raises(ConfigError, match=words):
        convert(table, HubCoreSettings, where="hub.toml")


def test_a_limit_of_a_day_that_bears_the_pings_is_taken():
    rarely = {"liveness": {"heartbeat_s": 3600.0, "lease_s": 7300.0}, "limits": {"bytes_per_day_max": "10 kB"}}
    assert convert(rarely, HubCoreSettings, where="hub.toml").limits.bytes_per_day_max == 10_000
