"""Format human-readable times."""

from datetime import datetime


def written(time_s: float) -> str:
    """Format a Unix time in seconds as local ISO 8601 time, with the offset from UTC."""
    return datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")
