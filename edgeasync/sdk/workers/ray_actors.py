"""`engine="ray"`: workers as actors on a Ray cluster, connected by TCP and authenticated by keys."""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from edgeasync.durable.device_keys import UnkeptDeviceKeys
from edgeasync.durable.keys import HubKeys
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from edgeasync.sdk.shares import Share
from edgeasync.sdk.workers.base import (
    Job,
    MakeTrainer,
    RevivedWorkers,
    WorkerDiedError,
    in_thread,
    make_trainer,
    note_worker,
    worker_name,
)
from edgeasync.sdk.workers.pickling import HOW
from edgeasync.temporary import TemporaryFolder
from edgeasync.training.trainer import Trainer

LOG = logging.getLogger("edgeasync.workers")

PLACE_S = 30.0
"""Time in seconds that a worker waits for cluster resources before a warning is logged."""

WAITS = "%s waits for resources on the Ray cluster: %s; free some, or use fewer workers"

REACH_S = 5.0
"""Time limit in seconds for connecting to the cluster."""

CLOSE_S = 5.0
"""Time in seconds that an actor may take to end before it is killed."""


class Actor:
    """A worker in a process started by Ray."""

    def __init__(self) -> None:
        self._agent: AgentRuntime | None = None

    async def prepare(self, share: Share, make: MakeTrainer, job: Job) -> None:
        """Create the trainer; raise its errors unchanged."""
        self._trainer: Trainer = await asyncio.to_thread(make_trainer, share, make, job)

    async def run(self, job: Job) -> None:
        """Train until the hub has finished; the worker's private key never leaves this process."""
        self._agent = job.make_agent(self._trainer, keys=UnkeptDeviceKeys())
        await self._agent.run()

    async def stop(self) -> None:
        """Make `run` return."""
        if self._agent is not None:
            self._agent.request_stop()


class RayWorkers(RevivedWorkers):
    """Workers as actors on a Ray cluster."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int, address: str | None) -> None:
        super().__init__(shares, make, seed)
        self._address = address
        self._ray = _import_ray()
        self._connected = False

    async def __aenter__(self) -> Self:
        """Connect to the cluster, upload the workers' data, and create the hub's keys."""
        self._temporary = await in_thread(TemporaryFolder)
        self.keys = self._folder = self._temporary.path
        try:
            await in_thread(self._prepare)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Delete the keys, and disconnect from the cluster unless the user had connected to it."""
        await in_thread(self._leave)

    def _prepare(self) -> None:
        ray = self._ray
        _check_reached(self._address)
        if not ray.is_initialized():
            self._connected = True
            try:
                ray.init(self._address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as error:
                words = " ".join(str(error).split())
                raise ConfigError(f"cannot start or connect to Ray: {words}") from error
        elif self._address is not None:
            raise ConfigError(
                "ray_address is set, but this program is already connected to Ray; remove ray_address"
            )
        HubKeys.init(self._folder)
        self.bind = f"tcp://{ray.util.get_node_ip_address()}:*"
        try:
            self._given = [ray.put(share) for share in self._shares]
            self._given_make = ray.put(self._make)
        except TypeError as error:
            words = " ".join(str(error).split())
            raise ConfigError(
                f"the data or trainer of a worker cannot be pickled for Ray: {words}; {HOW}"
            ) from error
        count, free = len(self._shares), ray.available_resources()
        # Resources are divided evenly, so that all workers can be placed at once.
        self._needs = {
            "num_cpus": _part(free.get("CPU", 0.0), count),
            "num_gpus": _part(free.get("GPU", 0.0), count),
        }

    def _leave(self) -> None:
        if self._connected:
            self._ray.shutdown()
        self._temporary.remove()

    async def _live(self, hub: HubRuntime, number: int, deaths: int) -> None:
        name, loop = worker_name(number), asyncio.get_running_loop()
        job = self._job(hub, number, deaths)
        actor = self._ray.remote(Actor).options(**self._needs).remote()
        waits = loop.call_later(PLACE_S, LOG.warning, WAITS, name, self._needs)
        try:
            await self._result(actor, actor.prepare.remote(self._given[number - 1], self._given_make, job), name)
            waits.cancel()
            if self._stopping.is_set():
                return
            # Issued late, because a token expires in minutes, and placement may take longer.
            token = HubKeys(self._folder).issue_token(name, (hub.address,), time.time())
            await self._result(actor, actor.run.remote(msgspec.structs.replace(job, token=token.text())), name)
        finally:
            waits.cancel()
            self._ray.kill(actor)

    async def _result(self, actor: Any, ref: Any, name: str) -> None:
        """Wait for an actor's call or for the end of the run.

        Raises the call's error, or `WorkerDiedError` if the actor died.
        """
        call = asyncio.wrap_future(ref.future())
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([call, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and not call.done():
                actor.stop.remote()
                await asyncio.wait([call], timeout=CLOSE_S)
            if not call.done():
                return
            call.result()
        except self._ray.exceptions.RayTaskError as error:
            raise note_worker(error.cause or EdgeAsyncError(str(error)), name, str(error)) from None
        except self._ray.exceptions.RayActorError as error:
            if not self._stopping.is_set():
                raise WorkerDiedError(" ".join(str(error).split())) from None
        finally:
            stopping.cancel()


def _check_reached(address: str | None) -> None:
    """Raise `ConfigError` if nothing listens at HOST:PORT, because Ray would retry for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot reach a Ray cluster at {address}: {error}; start one with 'ray start --head', or correct "
            "ray_address"
        ) from error


def _part(free: float, count: int) -> float:
    """Return a worker's amount of a resource: an equal part of the free amount, at most 1."""
    return min(1.0, int(1000 * free / count) / 1000)


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError("engine='ray' needs Ray; run pip install 'edgeasync[ray]'") from None
    return ray
