"""What the engines of `train` have in common: their shape, the agent of a worker, and how one comes back."""

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
"""A worker that has died `DEATHS_MAX` times within these seconds does not come back: it would die again."""

END_S = 3.0
"""How long a worker's process may take to end once its parent wants it to, or is gone."""

MakeTrainer = Callable[[Dataset, int, int], Trainer]
"""Makes a trainer from examples, a seed, and the number of threads that it may compute with."""

Result = TypeVar("Result")


class Workers(ABC):
    """The workers of one run. `async with` prepares them, and at its end leaves nothing of them behind."""

    bind = ""
    """Where the hub of these workers is to listen; known inside of `async with`."""
    network: ZmqNetwork | None = None
    """The network that the hub has to share with them, if any."""
    keys: Path | None = None
    """The hub's folder of keys, if they speak over a network."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Make ready what workers need; raises `ConfigError` for what cannot be handed to them."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Leave nothing behind."""

    @abstractmethod
    async def run(self, hub: HubRuntime) -> None:
        """Train for a hub that listens, until all have ended; raise what one of them ended with."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to end, and begin none any more: the hub has ended. Called on the loop."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="agent"):
    """Which worker is to train for which hub."""

    number: int
    address: str
    incarnation: int
    seed: int
    threads: int = 1
    examples: int = 0
    """How many it has, or 0 if nobody knows."""
    token: str | None = None

    @property
    def end_s(self) -> float:
        """How long it may take to end once it is to: what it has trained since its last update is lost anyway."""
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
        """Return the agent of this worker, not running yet. It is the same device in every call on a run."""
        section = AgentSection(hub=self.address, enrol=self.token)
        identity = DeviceIdentity(self.name, f"{self.number:032x}", self.incarnation)
        return AgentRuntime(
            AgentSettings(agent=section),
            Device(self.name, keys=keys).open(identity, section),
            Workload(lambda _: trainer, examples=self.examples, fingerprint=trainer.spec.fingerprint),
            network=network,
        )


class RevivedWorkers(Workers):
    """Workers each of which comes back when it dies."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int) -> None:
        self._shares = shares
        self._make = make
        self._seed = seed
        self._stopping = asyncio.Event()

    async def run(self, hub: HubRuntime) -> None:
        """Keep all workers alive."""
        await run_together(
            keep_alive(worker_name(number), partial(self._live, hub, number))
            for number in range(1, len(self._shares) + 1)
        )

    def stop(self) -> None:
        """Let the workers end."""
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
        """Run a worker to its end; raises what it raised, or `WorkerDiedError` if it died."""


class WorkerDiedError(Exception):
    """A worker ended without a word; the message says how."""


def worker_name(number: int) -> str:
    """Return the device id of a worker, counted from 1."""
    return f"worker-{number}"


def incarnation_of(hub: HubRuntime, number: int, deaths: int = 0) -> int:
    """Return the incarnation of a worker: the one that this run knows or, after a death, the next one."""
    member = hub.core.members.members.get(worker_name(number))
    return (1 if member is None else member.incarnation) + (deaths > 0)


def seed_of(seed: int, number: int, count: int, incarnation: int) -> int:
    """Return the seed of one of `count` workers.

    One that comes back draws other batches: it does not see the first ones again and again.
    """
    return seed + number - 1 + count * (incarnation - 1)


class HasSeed(Protocol):
    """What a worker's trainer is made by."""

    @property
    def seed(self) -> int:
        """The seed of the order of examples."""

    @property
    def threads(self) -> int:
        """How many threads a step may use."""


def make_trainer(share: Share, make: MakeTrainer, job: HasSeed) -> Trainer:
    """Return the trainer of a worker, made of its examples unless it is one already."""
    return make(share, job.seed, job.threads) if isinstance(share, Dataset) else share


def examples_of(share: Share) -> int:
    """Return how many examples a worker has, or 0 if only its own trainer knows."""
    return len(share) if isinstance(share, Dataset) else 0


def note_worker(error: BaseException, name: str, trace: str = "") -> BaseException:
    """Note on an error which worker it comes from, and the place there; return it."""
    error.add_note(f"raised in {name}" + (f":\n{trace}" if trace else ""))
    return error


async def keep_alive(name: str, live: Callable[[int], Awaitable[None]]) -> None:
    """Let a worker live, and again whenever it has died, by `live(deaths)`.

    Raises what `live` raises, and `EdgeAsyncError` for a worker that dies again and again.
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
                    f"{name} died {DEATHS_MAX} times within {lasted_s:.0f} s, at last {died}; look at what it "
                    "prints, and whether there is enough memory for all workers"
                ) from None
            LOG.warning("%s died, %s; it comes back", name, died)


async def run_together(all_of_them: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines until all have ended. If one raises, cancel the others; raise what was raised first."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in all_of_them:
                group.create_task(each)
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def in_thread(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, from a thread.

    Cancelled, wait for its end all the same: it may write what is to be removed next.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
