"""What a run has trained where its journal cannot be replayed; `edgeasync export` is tested with real runs."""

import os

import numpy as np
import pytest
import safetensors.numpy

from edgeasync.core.hub.events import Evaluated, HubStopRequested
from edgeasync.core.recovery.log import write_entry
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.run_folder import BEST_FILE, MODEL_FILE
from edgeasync.errors import ConfigError, StorageError
from edgeasync.graphs.model_file import save_model
from edgeasync.ops.trained import best_model, newest_model
from tests.support.parts.runs import SPEC, open_run


def begin(path, entries):
    """Begin a run as a hub does, and write these versions' entries to its journal."""
    run = open_run(FolderDisk(path))
    writer = run.journal
    writer.append([(write_entry(HubStopRequested(), 1.0, [], version, b""), None) for version in entries])
    writer.close()


def save(path, version, loss=None):
    evaluation = None if loss is None else Evaluated(version, loss, None)
    vector = np.full(3, version, np.float32)
    save_model(path, SPEC, vector, lineage="a" * 16, version=version, evaluation=evaluation)


def test_a_folder_with_nothing_but_a_model(tmp_path):
    """A hub begins with it; another maker's says no version."""
    with pytest.raises(StorageError, match="no such file"):
        newest_model(tmp_path)
    save(tmp_path / MODEL_FILE, 7, loss=0.25)
    found = newest_model(tmp_path)
    assert (found.version, found.lineage, found.evaluation) == (7, "a" * 16, Evaluated(7, 0.25, None))
    assert found.arrays["weights"].tolist() == [7.0, 7.0, 7.0]
    assert abs(found.made_s - (tmp_path / MODEL_FILE).stat().st_mtime) < 2.0
    assert found.remarks == []
    os.utime(tmp_path / MODEL_FILE, (0.0, 0.0))  # as a copy has another time than the original
    assert newest_model(tmp_path).made_s == found.made_s


def test_what_another_maker_wrote_beside_its_model_means_nothing(tmp_path):
    metadata = {"version": "first", "loss": "low", "time": "yesterday"}
    safetensors.numpy.save_file({"weights": np.ones(3, np.float32)}, tmp_path / MODEL_FILE, metadata)
    os.utime(tmp_path / MODEL_FILE, (5.0, 5.0))
    found = newest_model(tmp_path)
    assert (found.version, found.lineage, found.evaluation, found.made_s) == (0, "", None, 5.0)


def test_a_journal_that_cannot_be_replayed_is_no_model(tmp_path):
    begin(tmp_path, [0, 1])
    save(tmp_path / MODEL_FILE, 0)
    with pytest.raises(StorageError, match="entry 2 of the journal produced version 0, but the run had version 1"):
        newest_model(tmp_path)
    with pytest.raises(StorageError, match="entry 2 of the journal produced version 0, but the run had version 1"):
        best_model(tmp_path)
    save(tmp_path / BEST_FILE, 1, loss=0.5)
    found = best_model(tmp_path)
    assert (found.version, found.evaluation) == (1, Evaluated(1, 0.5, None))
    (remark,) = found.remarks
    assert remark.startswith("a better version may exist")
    assert "entry 2 of the journal" in remark


def test_a_best_file_that_is_torn_does_not_hide_what_the_journal_says(tmp_path):
    begin(tmp_path, [0])
    (tmp_path / BEST_FILE).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="no version has been evaluated yet"):
        best_model(tmp_path)


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "soon"])
def test_a_time_that_is_none_is_a_clear_error(tmp_path, time):
    metadata = {"format": "edgeasync", "time": time}
    safetensors.numpy.save_file({"weights": np.ones(3, np.float32)}, tmp_path / MODEL_FILE, metadata)
    with pytest.raises(StorageError, match="not a readable safetensors file"):
        newest_model(tmp_path)
