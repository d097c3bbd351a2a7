"""A run's folder is read without a trace, by any user who may read it."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from edgeasync import Run
from edgeasync.durable.run_folder import RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.durable.verification import verify_run
from edgeasync.errors import StorageError
from edgeasync.ops.runs import list_checkpoints, list_runs
from edgeasync.ops.trained import local_patterns, newest_model
from edgeasync.runtime.hub_record import read_record
from tests.support.formats.write_formats import FOLDER

NOBODY = 65534


@pytest.fixture
def run():
    """A folder of one run that this process may read and not write; root becomes another user for that."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(FOLDER / "run", Path(folder) / "run"))
        (run / "lock").touch()
        for path in run.iterdir():
            path.chmod(0o444)
        for path in (run, run.parent):
            path.chmod(0o555)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(NOBODY)
            yield run
        finally:
            if root:
                os.seteuid(0)
            for path in (run.parent, run):
                path.chmod(0o755)


def replay(run):
    with pytest.raises(OSError, match="denied"):
        (run / "more").touch()
    return [replay.tell(lambda _: True) for replay in RunReplay.of_parts(run)]


READERS = {
    "runs": lambda run: list_runs(run.parent)[0].trouble == [],
    "checkpoints": lambda run: all(not one.trouble for one in list_checkpoints(run)),
    "replay": replay,
    "verify": lambda run: verify_run(run).compared,
    "export": lambda run: newest_model(run).arrays,
    "local": lambda run: local_patterns(run) == [],
    "resume": lambda run: read_record(run).hub.run,
    "history": lambda run: RunFolder(run).history().updates,
    "Run": lambda run: Run.open(run).events and len(Run.open(run).history),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_run_is_read_by_a_user_who_may_not_write(run, reader):
    def look():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}

    before, changed_ns = look(), run.stat().st_mtime_ns
    assert READERS[reader](run)
    assert (look(), run.stat().st_mtime_ns) == (before, changed_ns)


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(StorageError, match="run: no such folder; pass the folder of a hub's run"):
        RunFolder.open(tmp_path / "run")
    assert not RunFolder(tmp_path / "run").has_checkpoint
    assert not RunFolder(tmp_path / "run").is_known
