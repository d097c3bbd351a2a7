"""The memory that `model inspect` reports, against a device's trainer that takes steps on data."""

import json

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks import train_step_files as files
from benchmarks.train_step import run_module
from benchmarks.train_step_models import MODELS
from benchmarks.train_step_prepare import write_model
from edgeasync.graphs.step_process import measure_step
from edgeasync.parameters import ParameterSpec

pytestmark = pytest.mark.process

CLOSE = 0.15


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_step_is_that_of_a_real_one(name, tmp_path):
    folder = tmp_path / name
    write_model(name, folder)
    real = json.loads(run_module("train_step_ours", [str(folder)]))["peak_bytes"]
    real -= np.load(folder / files.X_FILE, mmap_mode="r").nbytes  # `inspect` has no data
    spec = msgspec.json.decode((folder / files.SPEC_FILE).read_bytes(), type=ParameterSpec)
    graph = (folder / files.GRAPH_FILE).read_bytes()
    found = measure_step(graph, spec, files.BATCH, threads=1, s_max=60.0, bytes_max=1 << 32)
    assert abs(found.memory_bytes / real - 1) < CLOSE
