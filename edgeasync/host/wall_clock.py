"""Times as people read them."""

from datetime import datetime


def written(time_s: float) -> str:
    """Return a time by the wall clock, seconds since 1970, as ISO 8601 has it: local, with the offset from UTC."""
    return datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")
