"""What this machine has."""

import os


def memory_bytes() -> int:
    """Return how much memory there is, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
