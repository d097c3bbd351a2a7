"""What a program of the reference says and edgeasync does not need: it is accepted, and said once."""

import logging
from functools import cache

LOG = logging.getLogger("edgeasync.async_train")


def ignore(where: str, why: str, **arguments: object) -> None:
    """Say once in the log that arguments of `where` do nothing here, and why; `None` was not given.

    >>> ignore("AsyncModelAverager", "edgeasync speaks over ZeroMQ", communication_backend=None)
    """
    for name, value in arguments.items():
        if value is not None:
            say_once(f"{where}: {name} is ignored: {why}")


@cache
def say_once(line: str) -> None:
    """Say a line in the log, once in this process."""
    LOG.warning("%s", line)
