"""A worker process of `engine="processes"`, started by the forker; it ends with the program."""

import asyncio
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.peer import PeerRuntime
from edgeasync.sdk.workers.base import END_S, Job, make_trainer
from edgeasync.sdk.workers.files import MAKE_FILE, WorkerFiles
from edgeasync.sdk.workers.peer_job import PeerJob, note_end
from edgeasync.sdk.workers.pickling import dump_error, load

LOOK_S = 1.0
"""Interval in seconds between checks that the parent still runs.

The pipe alone does not show this, because a forked copy of the program may keep it open.
"""


def main(folder: Path, number: int, lifeline: int, program: int) -> None:
    """Run a worker until its training ends, or until the program ends the worker.

    `folder` contains the worker's files. `lifeline` is a pipe from the process `program`, which
    writes to the pipe to end the worker.
    """
    files = WorkerFiles(folder, number)
    agents: list[AgentRuntime | PeerRuntime] = []

    def on_end(*, orphaned: bool) -> None:
        if orphaned:
            shutil.rmtree(folder, ignore_errors=True)  # the program can no longer do this
        if agents:
            loop.call_soon_threadsafe(agents[0].request_stop)
            ended.wait(END_S if orphaned else job.end_s)
        os._exit(1)

    ended = threading.Event()
    threading.Thread(target=watch, args=(lifeline, program, on_end), name="program", daemon=True).start()
    loop = asyncio.new_event_loop()
    try:
        job = msgspec.json.decode(files.job.read_bytes(), type=Job | PeerJob)
        trainer = make_trainer(files.read_share(), load((folder / MAKE_FILE).read_bytes()), job)
        agent = job.make_agent(trainer) if isinstance(job, Job) else job.make_peer(trainer, folder)
        agents.append(agent)
        loop.run_until_complete(agent.run())
        if isinstance(agent, PeerRuntime):
            note_end(agent, folder, number)
    except BaseException as error:  # noqa: BLE001 - raised again in the parent
        files.put_result(dump_error(error))
    else:
        files.put_result(b"")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for an abandoned local step


def watch(lifeline: int, program: int, on_end: Callable[..., None]) -> None:
    """Call `on_end` when the program ends the worker, or when the program or forker has exited."""
    forker = os.getppid()
    while os.getppid() == forker:
        if select.select([lifeline], [], [], LOOK_S)[0]:
            return on_end(orphaned=not os.read(lifeline, 1))  # a program that has exited writes no byte
    return on_end(orphaned=not Path(f"/proc/{program}").exists())
