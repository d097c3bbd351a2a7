"""The table of devices on the narrowest terminal people have."""

import io

from rich.console import Console

from edgeasync.cli.status import device_table

DEVICE = {
    "state": "quarantined",
    "staleness": 123,
    "local_steps": 128,
    "last_seen_s": 12.34,
    "examples_per_s": 123456.7,
    "updates_applied": 1234567,
    "loss": 1234.5678,
}


def test_nothing_is_cut_at_80_columns():
    console = Console(width=80, file=io.StringIO())
    names = [f"greenhouse-{number}" for number in range(3)]
    console.print(device_table([DEVICE | {"id": name} for name in names], dict.fromkeys(names, 4194303)))
    text = console.file.getvalue()
    assert "…" not in text
    for word in (*names, "quarantined", "4194303", "1234567", "123457", "12.3 s"):
        assert word in text
