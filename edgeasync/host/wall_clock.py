"""Format times for people."""

from datetime import datetime


def written(time_s: float) -> str:
    """Return a wall-clock time in seconds since 1970 as local ISO 8601, with the offset from UTC."""
    return datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")
