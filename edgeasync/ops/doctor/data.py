"""Checks a device's data file."""

import time
from pathlib import Path

from edgeasync.config import expanded
from edgeasync.data.dataset import Dataset
from edgeasync.data.files import load
from edgeasync.errors import ConfigError, DataError
from edgeasync.ops.doctor.finding import Finding, ok, told, warn


def examine_data(path: Path | None) -> tuple[Dataset | None, Finding]:
    """Load the data and return them with a finding. The data are None if they cannot be loaded."""
    if path is None:
        return None, warn("data", "not set", "pass --data FILE, or the agent's settings file")
    begun_s = time.perf_counter()
    try:
        dataset = load(expanded(path))
    except (ConfigError, DataError) as error:
        return None, told("data", error)
    seconds = time.perf_counter() - begun_s
    return dataset, ok("data", f"{path}: {len(dataset):,} examples, read in {seconds:.1f} s")
