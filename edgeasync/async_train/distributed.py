"""Who this process is among those of a run, as torchrun says it. Environment variables are read here alone."""

import os
from typing import NamedTuple

from edgeasync.async_train.ignored import ignore
from edgeasync.errors import ConfigError

MASTER_PORT = 29500
"""Torchrun's own."""


class ProcessRank(NamedTuple):
    """The number of this process, from 0, and how many there are."""

    rank: int
    world_size: int


def init_distributed(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> ProcessRank:
    """Return rank and world size, from the arguments or from RANK and WORLD_SIZE; without either `(0, 1)`.

    `master_addr` and `master_port` are written to MASTER_ADDR and MASTER_PORT, where torchrun would have put them.
    Raises `ConfigError` for numbers that do not fit.

    >>> from edgeasync.async_train import init_distributed
    >>> init_distributed(rank=1, world_size=4)
    ProcessRank(rank=1, world_size=4)
    """
    ignore("init_distributed", "edgeasync speaks over ZeroMQ", backend=backend)
    if master_addr is not None:
        os.environ["MASTER_ADDR"] = master_addr
    if master_port is not None:
        os.environ["MASTER_PORT"] = str(master_port)
    number = _number("RANK", "0") if rank is None else rank
    count = _number("WORLD_SIZE", "1") if world_size is None else world_size
    if not 0 <= number < count:
        raise ConfigError(f"rank is {number} of world_size {count}; ranks are 0 to world_size - 1")
    return ProcessRank(number, count)


def find_master() -> str:
    """Return the address of rank 0's hub, by MASTER_ADDR and MASTER_PORT."""
    return f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{_number('MASTER_PORT', str(MASTER_PORT))}"


def _number(name: str, usual: str) -> int:
    try:
        return int(os.environ.get(name, usual))
    except ValueError:
        raise ConfigError(f"{name} is {os.environ[name]!r}; torchrun sets a whole number") from None
