"""A training graph split into a small graph and its base: the same results, one file per content."""

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync import nn
from edgeasync.autodiff.adapters import adapt_as
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset
from edgeasync.errors import StorageError
from edgeasync.graphs.split_base import ALIGNED_BYTES, BASE_BYTES_MIN, split_base
from edgeasync.losses import CrossEntropy
from edgeasync.protocol.graph import fingerprint_of
from edgeasync.training.graph_check import check_graph
from edgeasync.training.onnx_trainer import OnnxTrainer
from edgeasync.training.plan import LocalTraining

WIDTH = 600
LARGE = {"0.weight", "0.bias", "2.weight", "2.bias"}
"""The frozen arrays of at least 1 KiB."""


def built(loss="cross_entropy", width=WIDTH):
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    forward = nn.to_onnx(model, (8,)).SerializeToString()
    return build_training_graph(forward, GraphSettings(train=("4.*",), loss=loss))


def gradients(session, spec, initial):
    x = np.random.default_rng(1).random((5, 8), np.float32)
    return session.run(None, {**spec.views(initial), "x": x, "target": np.arange(5) % 3})


def test_the_parts_compute_what_the_whole_graph_computes(tmp_path):
    whole = built()
    graph, base = split_base(whole.model, tmp_path)
    check_graph(graph, bytes_max=len(graph), base=base)
    (tmp_path / "graph.onnx").write_bytes(graph)
    sessions = [onnxruntime.InferenceSession(model) for model in (whole.model, tmp_path / "graph.onnx")]
    found = [gradients(session, whole.spec, whole.initial) for session in sessions]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sessions[0].get_modelmeta().custom_metadata_map == sessions[1].get_modelmeta().custom_metadata_map

    kept = {array.name: array for array in onnx.load_model_from_string(graph).graph.initializer}
    assert {name for name, array in kept.items() if array.external_data} >= LARGE
    assert len(graph) + base.nbytes < 1.01 * len(whole.model)
    content = (tmp_path / base.file_name).read_bytes()
    assert (fingerprint_of(content), len(content)) == base
    entries = [entry for array in kept.values() for entry in array.external_data]
    assert {int(entry.value) % ALIGNED_BYTES for entry in entries if entry.key == "offset"} == {0}


def test_a_trainer_reads_the_base_from_its_folder(tmp_path):
    whole = built()
    graph, base = split_base(whole.model, tmp_path)
    data = Dataset.of(np.random.default_rng(2).random((20, 8), np.float32), np.arange(20) % 3)
    found = []
    for model, folder in ((whole.model, None), (graph, tmp_path)):
        trainer = OnnxTrainer(model, whole.spec, data, LocalTraining(batch_size=4), base_folder=folder)
        found.append(whole.initial.copy())
        trainer.begin(found[-1])
        for _ in range(3):
            trainer.step()
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], whole.initial)
    assert [file.name for file in tmp_path.iterdir()] == [base.file_name], "the graph's file is gone"


def test_a_split_graph_names_the_adapters_that_it_trains(tmp_path):
    content = nn.to_onnx(nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)), (8,)).SerializeToString()
    whole = build_training_graph(content, GraphSettings(lora=2))
    graph, base = split_base(whole.model, tmp_path)
    assert base is not None
    assert adapt_as(content, bytes(graph)) == whole.forward


def test_the_same_frozen_values_make_the_same_base(tmp_path):
    graph, base = split_base(built().model, tmp_path)
    written = (tmp_path / base.file_name).stat()
    assert split_base(built().model, tmp_path) == (graph, base)
    other_graph, same_base = split_base(built(loss=CrossEntropy(label_smoothing=0.1)).model, tmp_path)
    assert (other_graph != graph, same_base) == (True, base)
    assert (tmp_path / base.file_name).stat().st_ino == written.st_ino, "the file is not written again"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_written_again(tmp_path):
    whole = built()
    _, base = split_base(whole.model, tmp_path)
    content = (tmp_path / base.file_name).read_bytes()
    (tmp_path / base.file_name).write_bytes(content[:-1] + b"!")
    split_base(whole.model, tmp_path)
    assert (tmp_path / base.file_name).read_bytes() == content


def test_few_frozen_values_stay_in_the_graph(tmp_path):
    small = built(width=100)
    assert split_base(small.model, tmp_path) == (small.model, None)
    assert len(small.model) < BASE_BYTES_MIN
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        split_base(built().model, tmp_path / "file")
