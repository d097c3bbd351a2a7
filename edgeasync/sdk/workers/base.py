"""Base classes for the engines of `train`, which create agents and restart crashed workers."""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec

from edgeasync.data.dataset import Dataset
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.errors import EdgeAsyncError
from edgeasync.net.network import ZmqNetwork
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.workload import Workload
from edgeasync.sdk.shares import Share
from edgeasync.training.trainer import Trainer

LOG = logging.getLogger("edgeasync.workers")

DEATHS_MAX = 4
DEATHS_S = 120.0
"""A worker that dies `DEATHS_MAX` times within `DEATHS_S` seconds is not restarted."""

END_S = 3.0
"""Time in seconds that a worker's process may take to end after its parent's request or exit."""

MakeTrainer = Callable[[Dataset, int, int], Trainer]
"""A function that creates a trainer from examples, a seed and a number of threads."""

Result = TypeVar("Result")


class Workers(ABC):
    """The workers of one run; `async with` prepares them and cleans up at the end."""

    bind = ""
    """The address that the workers' hub must listen on; known inside `async with`."""
    network: ZmqNetwork | None = None
    """The network that the hub must share with the workers, if any."""
    keys: Path | None = None
    """The hub's key folder, if workers connect over a network."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Prepare the workers; raises `ConfigError` for objects that cannot be serialized."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Clean up."""

    @abstractmethod
    async def run(self, hub: HubRuntime) -> None:
        """Train for a listening hub until all workers have ended; if any fails, raise its error."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all workers, because the hub has ended, and do not restart any; called on the loop."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="agent"):
    """The number of a worker, and the hub for which the worker trains."""

    number: int
    address: str
    incarnation: int
    seed: int
    threads: int = 1
    examples: int = 0
    """The number of the worker's examples, or 0 if unknown."""
    token: str | None = None

    @property
    def end_s(self) -> float:
        """Time limit in seconds for ending; it is short, because the last steps are lost anyway."""
        return END_S

    @property
    def name(self) -> str:
        """The worker's device id."""
        return worker_name(self.number)

    def make_agent(
        self,
        trainer: Trainer,
        network: ZmqNetwork | None = None,
        keys: DeviceKeys | None = None,
    ) -> AgentRuntime:
        """Create the worker's agent without starting it; its device id is the same in every call."""
        section = AgentSection(hub=self.address, enrol=self.token)
        identity = DeviceIdentity(self.name, f"{self.number:032x}", self.incarnation)
        return AgentRuntime(
            AgentSettings(agent=section),
            Device(self.name, keys=keys).open(identity, section),
            Workload(lambda _: trainer, examples=self.examples, fingerprint=trainer.spec.fingerprint),
            network=network,
        )


class RevivedWorkers(Workers):
    """Workers that are restarted when they die."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int) -> None:
        self._shares = shares
        self._make = make
        self._seed = seed
        self._stopping = asyncio.Event()

    async def run(self, hub: HubRuntime) -> None:
        """Run all workers, and restart those that die."""
        await run_together(
            keep_alive(worker_name(number), partial(self._live, hub, number))
            for number in range(1, len(self._shares) + 1)
        )

    def stop(self) -> None:
        """Stop the workers."""
        self._stopping.set()

    def _job(self, hub: HubRuntime, number: int, deaths: int, threads: int = 1) -> Job:
        incarnation = incarnation_of(hub, number, deaths)
        return Job(
            number=number,
            address=hub.address,
            incarnation=incarnation,
            seed=seed_of(self._seed, number, len(self._shares), incarnation),
            threads=threads,
            examples=examples_of(self._shares[number - 1]),
        )

    @abstractmethod
    async def _live(self, hub: HubRuntime, number: int, deaths: int) -> None:
        """Run a worker until it ends; raise its error, or `WorkerDiedError` if it died."""


class WorkerDiedError(Exception):
    """A worker died without reporting an error; the message describes how it died."""


def worker_name(number: int) -> str:
    """Return the device id of a worker, counted from 1."""
    return f"worker-{number}"


def incarnation_of(hub: HubRuntime, number: int, deaths: int = 0) -> int:
    """Return a worker's incarnation: the last that the hub knows or, after a crash, the next."""
    member = hub.core.members.members.get(worker_name(number))
    return (1 if member is None else member.incarnation) + (deaths > 0)


def seed_of(seed: int, number: int, count: int, incarnation: int) -> int:
    """Return the seed of one of `count` workers.

    A restarted worker has another seed, so that it does not repeat the first batches.
    """
    return seed + number - 1 + count * (incarnation - 1)


class HasSeed(Protocol):
    """The seed and the number of threads with which a worker's trainer is created."""

    @property
    def seed(self) -> int:
        """The seed for shuffling the examples."""

    @property
    def threads(self) -> int:
        """The number of threads that a step may use."""


def make_trainer(share: Share, make: MakeTrainer, job: HasSeed) -> Trainer:
    """Create a worker's trainer from its examples, or return its own trainer."""
    return make(share, job.seed, job.threads) if isinstance(share, Dataset) else share


def examples_of(share: Share) -> int:
    """Return the number of a worker's examples, or 0 if only the user's trainer knows it."""
    return len(share) if isinstance(share, Dataset) else 0


def note_worker(error: BaseException, name: str, trace: str = "") -> BaseException:
    """Add the worker's name and traceback to an error as a note; return the error."""
    error.add_note(f"raised in {name}" + (f":\n{trace}" if trace else ""))
    return error


async def keep_alive(name: str, live: Callable[[int], Awaitable[None]]) -> None:
    """Run a worker with `live(deaths)`, and again each time it dies.

    Raises the errors of `live`, and `EdgeAsyncError` for a worker that dies repeatedly.
    """
    died_s: list[float] = []
    while True:
        try:
            return await live(len(died_s))
        except WorkerDiedError as died:
            died_s.append(time.monotonic())
            lasted_s = died_s[-1] - died_s[-DEATHS_MAX] if len(died_s) >= DEATHS_MAX else math.inf
            if lasted_s < DEATHS_S:
                raise EdgeAsyncError(
                    f"{name} died {DEATHS_MAX} times within {lasted_s:.0f} s, last: {died}; check its output, and "
                    "whether there is enough memory for all workers"
                ) from None
            LOG.warning("%s died, %s; restarting it", name, died)


async def run_together(all_of_them: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines until all have ended; if one raises an error, cancel the others and raise it."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in all_of_them:
                group.create_task(each)
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread and return its result.

    If this call is cancelled, it still waits for `work` to end, because `work` may be writing to
    files that the caller removes next.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
