"""How the end of a worker's process is understood."""

import asyncio
from types import SimpleNamespace

import pytest

from edgeasync.sdk.workers.base import Job, WorkerDiedError, worker_name
from edgeasync.sdk.workers.files import WorkerFiles
from edgeasync.sdk.workers.processes import run_process

JOB = Job(number=1, address="ipc://@hub", incarnation=1, seed=0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("result", "code", "stops", "died"),
    [
        (b"", 0, False, ""),
        (None, 3, False, "it ended with exit code 3"),
        (None, -9, True, ""),
        # Red before: a worker that notices the forker's death ends by itself, and then did not come back.
        (b"", -9, False, "it was killed by signal 9, Killed"),
    ],
)
async def test_a_worker_ends_well_only_if_its_process_does(tmp_path, result, code, stops, died):
    (tmp_path / worker_name(1)).mkdir()
    files, stopping = WorkerFiles(tmp_path, 1), asyncio.Event()

    def fork(number, lifeline):
        if result is not None:
            files.put_result(result)
        if stops:
            stopping.set()
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(code)
        return ended

    running = run_process(SimpleNamespace(folder=tmp_path, fork=fork), JOB, stopping)
    if died:
        with pytest.raises(WorkerDiedError, match=died):
            await running
    else:
        await running
