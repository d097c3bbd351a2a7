"""Logs once if the toolbox ignores an argument that it accepts only for compatibility."""

import logging
from functools import cache

LOG = logging.getLogger("edgeasync.async_train")


def ignore(where: str, why: str, **arguments: object) -> None:
    """Log once that `where` ignores these arguments, and why; skip arguments that are `None`.

    >>> ignore("AsyncModelAverager", "edgeasync uses ZeroMQ", communication_backend=None)
    """
    for name, value in arguments.items():
        if value is not None:
            say_once(f"{where}: {name} is ignored: {why}")


@cache
def say_once(line: str) -> None:
    """Log a warning, once per process."""
    LOG.warning("%s", line)
