"""`engine="processes"`: worker processes on this machine, connected by a local socket.

Workers are forked from a fresh interpreter, the forker. A script therefore needs no main guard, and
no thread or lock is copied. The forker imports shared modules once.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from edgeasync.runtime.hub import HubRuntime
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
"""Extra time in seconds, after a worker's own time limit for ending, until the worker is killed."""

ANSWER_BYTES_MAX = 64

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables for the number of threads of the libraries that numpy and torch use."""


class ProcessWorkers(RevivedWorkers):
    """Workers as processes of this machine."""

    def __init__(self, shares: Sequence[Share], make: MakeTrainer, seed: int) -> None:
        super().__init__(shares, make, seed)
        self._threads = threads_of(len(shares))

    async def __aenter__(self) -> Self:
        """Write the workers' files into a private folder, and start the forker."""
        self._temporary = await make_folder(partial(write_files, make=self._make, shares=self._shares))
        self._folder = self._temporary.path
        self.bind = f"ipc://{self._folder / HUB_SOCKET}"
        self._forker = Forker(self._folder, self._threads)
        self._forker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the forker and remove the folder."""
        await self._forker.close()
        await in_thread(self._temporary.remove)

    async def _live(self, hub: HubRuntime, number: int, deaths: int) -> None:
        await run_process(self._forker, self._job(hub, number, deaths, self._threads), self._stopping)


def threads_of(workers: int) -> int:
    """Return the number of threads of each worker."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


class Forker:
    """The process from which workers are forked. Call all methods on the event loop."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self._environment = {name: str(threads) for name in THREAD_VARIABLES} | os.environ
        self._environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._ended: dict[int, asyncio.Future[int]] = {}

    def start(self) -> socket.socket:
        """Start the process if necessary; return the socket for requests."""
        if self._requests is not None:
            return self._requests
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P excludes the current folder, because PYTHONPATH already contains the program's `sys.path`.
            command = [sys.executable, "-P", "-m", "edgeasync.sdk.workers.forker", str(self.folder)]
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                    process_group=0,  # so that Ctrl-C in the terminal reaches only the program
                )
            except OSError:
                ours.close()
                raise
        self._requests = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        return ours

    def fork(self, number: int, lifeline: int) -> asyncio.Future[int]:
        """Fork a worker; return a future of its exit code."""
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError):  # the forker has died; `_read` handles that
            socket.send_fds(self.start(), [str(number).encode()], [lifeline])
        return ended

    def kill(self, number: int) -> None:
        """Kill a worker."""
        if self._requests is not None and number in self._ended:
            with contextlib.suppress(ConnectionError):
                self._requests.send(str(number).encode())

    async def close(self) -> None:
        """End the process and wait for it."""
        self._disconnect()
        if self._process is not None:
            self._process.terminate()  # it may still be importing
            await asyncio.to_thread(self._process.wait)

    def _read(self) -> None:
        assert self._requests is not None
        try:
            answer = self._requests.recv(ANSWER_BYTES_MAX)
        except ConnectionError:
            answer = b""
        if answer:
            number, code = map(int, answer.split())
            self._ended.pop(number).set_result(code)
            return
        self._disconnect()  # the forker has died, and its workers will end, too
        assert self._process is not None
        code = self._process.wait()
        while self._ended:
            self._ended.popitem()[1].set_result(code)

    def _disconnect(self) -> None:
        if self._requests is not None:
            asyncio.get_running_loop().remove_reader(self._requests)
            self._requests.close()
            self._requests = None


async def run_process(forker: Forker, job: Job | PeerJob, stopping: asyncio.Event) -> None:
    """Run a worker's process until it ends, or until `stopping` is set.

    Raises the worker's error, or `WorkerDiedError` if it died.
    """
    if stopping.is_set():
        return
    files = WorkerFiles(forker.folder, job.number)
    files.job.write_bytes(msgspec.json.encode(job))
    async with _forked(forker, job.number, job.end_s + CLOSE_S) as ended:
        stopped = asyncio.ensure_future(stopping.wait())
        either: list[asyncio.Future[Any]] = [ended, stopped]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
    result, code = files.take_result(), ended.result()
    if result:
        raise load_error(result, worker_name(job.number))
    # A worker that loses the forker exits normally, although nobody asked it to.
    if (result is None or code) and not stopping.is_set():
        raise WorkerDiedError(describe_end(code))


@contextlib.asynccontextmanager
async def _forked(forker: Forker, number: int, close_s: float) -> AsyncIterator[asyncio.Future[int]]:
    """Fork a worker; on exit, tell it through a pipe to end, and kill it if it runs after `close_s`."""
    theirs, lifeline = os.pipe()
    try:
        ended = forker.fork(number, theirs)
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(theirs)
    try:
        yield ended
    finally:
        with contextlib.suppress(BrokenPipeError):  # the worker has ended
            os.write(lifeline, b".")
        os.close(lifeline)
        try:
            await asyncio.wait([ended], timeout=close_s)
        finally:
            if not ended.done():
                forker.kill(number)
                await asyncio.wait([ended])


def describe_end(code: int) -> str:
    """Describe how a process ended, from its exit code."""
    if code >= 0:
        return f"it ended with exit code {code}"
    return f"it was killed by signal {-code}, {signal.strsignal(-code)}"
