"""What stands where a file belongs: a pipe, a device without an end, a hole larger than any memory.

A stranger's folder may hold them. Every reader refuses them in one sentence; none waits or takes all memory.
"""

import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from edgeasync.async_train.data.images import read_picture
from edgeasync.data.files import load
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.json_file import read_json
from edgeasync.durable.local_file import LocalFile
from edgeasync.durable.spool_file import SpoolFile
from edgeasync.errors import DataError, EdgeAsyncError
from edgeasync.graphs.graph_cache import GraphCache
from edgeasync.graphs.graph_model import load_graph, read_onnx_file
from edgeasync.graphs.model_file import load_kept, read_header, read_model
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.source import held_file
from edgeasync.ops.doctor import training as doctor
from edgeasync.sdk.run import _restored
from edgeasync.training.numpy_models import SoftmaxModel
from tests.fuzz.running import limited
from tests.fuzz.test_targets import FINDINGS

SPEC = SoftmaxModel(inputs=4, classes=2).spec
MANIFEST = Manifest(
    software="", fingerprint="", lineage="", version=0, journal=0, now_s=0.0, updates_applied=0, created_s=0.0,
    nbytes=5,
)  # fmt: skip
MEMORY_BYTES = 1 << 30
HOLE_BYTES = 1 << 40
PATIENCE_S = 20.0


def hole(path):
    with path.open("wb") as file:
        file.truncate(HOLE_BYTES)


ODD = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "hole": hole,
    "link to itself": lambda path: path.symlink_to(path),
    "folder": lambda path: path.mkdir(),
}


def graph_cache(path):
    said = []
    assert GraphCache(path.parent).find(path.stem, said.append) is None
    raise EdgeAsyncError("; ".join(said))


def checkpoint(path):
    path.rename(path.with_name("checkpoint-0000000000-0.safetensors"))
    store = CheckpointStore(SimpleNamespace(read=FolderDisk(path.parent).read), keep=1)
    store._tensors("checkpoint-0000000000-0", MANIFEST)


def manifest(path):
    path.rename(path.with_name("checkpoint-0000000000-0.json"))
    _, ((_, trouble),) = CheckpointStore(FolderDisk(path.parent), keep=1).manifests()
    raise EdgeAsyncError(trouble)


READERS = {
    "examples.npz": load,
    "examples.csv": load,
    "model.safetensors": read_model,
    "best.safetensors": read_header,
    "peer.safetensors": lambda path: load_kept(path, SPEC, np.zeros(SPEC.length, np.float32)),
    "spool.safetensors": lambda path: SpoolFile(path.parent, "id").read(),
    "local.safetensors": lambda path: LocalFile(path.parent, "id").read(),
    "graph.onnx": graph_cache,
    "forward.onnx": lambda path: _restored(path.parent, {}),
    "training.onnx": held_file,
    "given.onnx": lambda path: load_graph(OnnxModel(file=str(path))),
    "shown.onnx": read_onnx_file,
    "timed.onnx": lambda path: doctor._make_trainer(path, None, "cpu", 1),
    "hub.json": lambda path: read_json(path, dict, remedy="delete it"),
    "tensors": checkpoint,
}


@pytest.fixture
def little_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_it_in_one_sentence(tmp_path, little_memory, name, kind):
    path = tmp_path / name
    ODD[kind](path)
    with limited(PATIENCE_S), pytest.raises(EdgeAsyncError) as told:
        READERS[name](path)
    assert str(told.value)
    assert "\n" not in str(told.value)
    assert "[Errno" not in str(told.value)


def test_so_is_a_hole_in_the_place_of_a_manifest(tmp_path, little_memory):
    hole(tmp_path / "manifest")
    with limited(PATIENCE_S), pytest.raises(EdgeAsyncError, match="cannot be read"):
        manifest(tmp_path / "manifest")


def test_and_a_picture_that_says_it_is_longer_than_memory(tmp_path, little_memory):
    (found,) = [path for path in FINDINGS if path.name == "picture.a-chunk-of-gigabytes"]
    shutil.copy(found, tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"picture\.png: not a readable image"):
        read_picture(tmp_path / "picture.png")
