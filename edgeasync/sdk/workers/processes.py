"""`engine="processes"`: each worker is a process of this machine, which speaks with the hub over a local socket.

A worker is a fresh interpreter that runs `child`, not a copy of this one: neither a main guard nor a script is
needed, and no thread or lock is copied.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from edgeasync.runtime.hub import Hub
from edgeasync.sdk.shares import Share
from edgeasync.sdk.workers.base import (
    Job,
    MakeTrainer,
    RevivedWorkers,
    WorkerDiedError,
    in_thread,
    worker_name,
)
from edgeasync.sdk.workers.files import HUB_SOCKET, WorkerFiles, make_folder, write_files
from edgeasync.sdk.workers.peer_job import PeerJob
from edgeasync.sdk.workers.pickling import load_error

CLOSE_S = 2.0
"""How much longer than it may a worker takes to end before it is killed."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""By which the libraries under numpy and torch are told how many threads to use; they read nothing else."""


class ProcessWorkers(RevivedWorkers):
    """Processes of this machine."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int) -> None:
        super().__init__(shares, make, seed)
        self._threads = max(1, len(os.sched_getaffinity(0)) // len(shares))

    async def __aenter__(self) -> Self:
        """Write what the workers need into a folder that only this user can open."""
        self._temporary = await make_folder(partial(write_files, make=self._make, shares=self._shares))
        self._folder = self._temporary.path
        self.bind = f"ipc://{self._folder / HUB_SOCKET}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Remove the folder."""
        await in_thread(self._temporary.remove)

    async def _live(self, hub: Hub, number: int, deaths: int) -> None:
        await run_process(self._folder, self._job(hub, number, deaths, self._threads), self._stopping)


async def run_process(folder: Path, job: Job | PeerJob, stopping: asyncio.Event) -> None:
    """Run a worker's process to its end, or until all are to stop.

    Raises what it raised, or `WorkerDiedError` if it died.
    """
    if stopping.is_set():
        return
    files = WorkerFiles(folder, job.number)
    files.job.write_bytes(msgspec.json.encode(job))
    async with Process(child_command(folder, job.number), job.threads, job.end_s + CLOSE_S) as process:
        stopped = asyncio.ensure_future(stopping.wait())
        either: list[asyncio.Future[Any]] = [process.ended, stopped]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
    result = files.take_result()
    if result:
        raise load_error(result, worker_name(job.number))
    if result is None and not stopping.is_set():
        raise WorkerDiedError(describe_end(process.ended.result()))


def child_command(folder: Path, number: int) -> list[str]:
    """Return the command of a worker's process, but for its lifeline."""
    # With -P the folder in which the program stands is not searched for modules: the parent's path says all.
    return [sys.executable, "-P", "-m", "edgeasync.sdk.workers.child", str(folder), str(number)]


class Process:
    """A child, and the pipe by which it is told to end. Leaving waits up to `close_s` for its end."""

    def __init__(self, command: list[str], threads: int, close_s: float) -> None:
        self._command = command
        self._close_s = close_s
        self._environment = {name: str(threads) for name in THREAD_VARIABLES} | os.environ
        self._environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - quick; it has to be there to be ended
                [*self._command, str(theirs), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
                env=self._environment,
                process_group=0,  # Ctrl-C in the terminal is for the parent alone
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)
        self._waiter = threading.Thread(target=self._wait, args=(loop,), name="edgeasync-worker", daemon=True)
        self._waiter.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._lifeline, b".")
        os.close(self._lifeline)
        try:
            await asyncio.wait([self.ended], timeout=self._close_s)
        finally:
            if not self.ended.done():
                self._process.kill()
                await asyncio.wait([self.ended])
            self._waiter.join()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(self.ended.set_result, code)


def describe_end(code: int) -> str:
    """Return how a process ended, by its exit code."""
    if code >= 0:
        return f"it ended with exit code {code}"
    return f"it was ended by signal {-code}, {signal.strsignal(-code)}"
