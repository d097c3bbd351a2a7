"""`engine="ray"`: each worker is an actor on a Ray cluster, which speaks with the hub over TCP under a key."""

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
"""How long a worker may wait for a place on the cluster before that is told."""

WAITS = "%s waits for a place on the Ray cluster, which needs %s; free some, or give fewer workers"

REACH_S = 5.0
"""How long the cluster may take to accept a connection."""

CLOSE_S = 5.0
"""How long an actor may take to end before it is killed."""


class Actor:
    """A worker, in a process that Ray has started somewhere."""

    def __init__(self) -> None:
        self._agent: AgentRuntime | None = None

    async def prepare(self, share: Share, make: MakeTrainer, job: Job) -> None:
        """Make the trainer; raises what that raises."""
        self._trainer: Trainer = await asyncio.to_thread(make_trainer, share, make, job)

    async def run(self, job: Job) -> None:
        """Train until the hub has finished. The key that the token is for is made here, and never leaves."""
        self._agent = job.make_agent(self._trainer, keys=UnkeptDeviceKeys())
        await self._agent.run()

    async def stop(self) -> None:
        """Let `run` return."""
        if self._agent is not None:
            self._agent.request_stop()


class RayWorkers(RevivedWorkers):
    """Actors on a Ray cluster."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int, address: str | None) -> None:
        super().__init__(shares, make, seed)
        self._address = address
        self._ray = _import_ray()
        self._connected = False

    async def __aenter__(self) -> Self:
        """Connect to the cluster, hand it what the workers train with, and make the hub's keys."""
        self._temporary = await in_thread(TemporaryFolder)
        self.keys = self._folder = self._temporary.path
        try:
            await in_thread(self._prepare)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect, unless somebody else had connected, and forget the keys."""
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
                raise ConfigError(f"Ray does not start, or does not let this program in: {words}") from error
        elif self._address is not None:
            raise ConfigError("ray_address is given, but this program is connected to Ray already; leave it out")
        HubKeys.init(self._folder)
        self.bind = f"tcp://{ray.util.get_node_ip_address()}:*"
        try:
            self._given = [ray.put(share) for share in self._shares]
            self._given_make = ray.put(self._make)
        except TypeError as error:
            words = " ".join(str(error).split())
            raise ConfigError(f"what the workers train with cannot be handed to Ray: {words}; {HOW}") from error
        count, free = len(self._shares), ray.available_resources()
        # Each gets its part of the cluster, so that all find a place at the same time.
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
            # Only now: a token counts for minutes, and the cluster may take longer to find a place.
            token = HubKeys(self._folder).issue_token(name, (hub.address,), time.time())
            await self._result(actor, actor.run.remote(msgspec.structs.replace(job, token=token.text())), name)
        finally:
            waits.cancel()
            self._ray.kill(actor)

    async def _result(self, actor: Any, ref: Any, name: str) -> None:
        """Wait for a call to an actor, or the end of all; raises what the call raised, or `WorkerDiedError`."""
        call = asyncio.wrap_future(ref.future())
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may ask for it
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
    """Raise `ConfigError` if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"no Ray cluster is reached at {address}: {error}; start one by 'ray start --head', or correct "
            "ray_address"
        ) from error


def _part(free: float, count: int) -> float:
    """Return what of a resource each worker gets: one, or a share of what is free."""
    return min(1.0, int(1000 * free / count) / 1000)


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError("engine='ray' needs Ray; install it by pip install 'edgeasync[ray]'") from None
    return ray
