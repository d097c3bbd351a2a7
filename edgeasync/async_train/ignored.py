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
            _say(where, name, why)


@cache
def _say(where: str, name: str, why: str) -> None:
    LOG.warning("%s: %s is ignored: %s", where, name, why)
