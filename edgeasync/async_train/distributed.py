"""Rank and world size as set by torchrun; only this module reads torchrun's environment variables."""

import os
from typing import NamedTuple

from edgeasync.async_train.ignored import ignore
from edgeasync.errors import ConfigError

MASTER_PORT = 29500
"""The default port of torchrun."""


class ProcessRank(NamedTuple):
    """The rank of this process, from 0, and the number of processes."""

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
    """Return this process's rank and the world size, by default `(0, 1)`.

    Omitted arguments default to the environment variables RANK and WORLD_SIZE. `master_addr` and
    `master_port` are written to MASTER_ADDR and MASTER_PORT. Raises `ConfigError` if the rank is
    not below the world size.

    >>> from edgeasync.async_train import init_distributed
    >>> init_distributed(rank=1, world_size=4)
    ProcessRank(rank=1, world_size=4)
    """
    ignore("init_distributed", "edgeasync uses ZeroMQ", backend=backend)
    if master_addr is not None:
        os.environ["MASTER_ADDR"] = master_addr
    if master_port is not None:
        os.environ["MASTER_PORT"] = str(master_port)
    number = _number("RANK", "0") if rank is None else rank
    count = _number("WORLD_SIZE", "1") if world_size is None else world_size
    if not 0 <= number < count:
        raise ConfigError(f"rank is {number}, but world_size is {count}; ranks are from 0 to world_size - 1")
    return ProcessRank(number, count)


def find_master() -> str:
    """Return the address of rank 0's hub from MASTER_ADDR and MASTER_PORT."""
    return f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{_number('MASTER_PORT', str(MASTER_PORT))}"


def _number(name: str, usual: str) -> int:
    try:
        return int(os.environ.get(name, usual))
    except ValueError:
        raise ConfigError(f"{name} is {os.environ[name]!r}; set an integer, as torchrun does") from None
