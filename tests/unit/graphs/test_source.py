"""Which model a run trains: what its files state of it, and which other files are accepted instead."""

from pathlib import Path

import onnx
import pytest

from edgeasync import nn
from edgeasync.autodiff.contents import SOURCE
from edgeasync.autodiff.export import export_model
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.graphs.graph_model import build_graph, keep_files
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.source import check_source, held_forward, source_in

WAYS = {
    "plain": {"train": ["2.*"]},
    "adapted": {"lora": "2:0"},
    "quantized": {"train": ["2.*"], "base": "int8"},
    "both": {"lora": "2:0", "train": ["2.bias"], "base": "int4"},
}


def network(seed):
    layers = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 3))
    return nn.to_onnx(layers, (8,), seed=seed).SerializeToString()


def built(content, **settings):
    return build_graph(content, OnnxModel(file="", **settings), "the model")


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_run_accepts_its_own_model_alone(settings, tmp_path):
    """Other first values of trained arrays are accepted, because they are replaced."""
    graph = built(network(0), **settings)
    keep_files(tmp_path, graph.graph, graph.forward)
    names = graph.spec.names
    retrained = onnx.load_model_from_string(network(0))
    for entry in retrained.graph.initializer:
        if entry.name in names:
            entry.raw_data = bytes(len(entry.raw_data))
    for own in (network(0), graph.forward, retrained.SerializeToString()):
        check_source(Path("own.onnx"), own, tmp_path, names, None)
    told = r"^other\.onnx: the frozen values differ from those of /models/own\.onnx, which .* was trained on; pass"
    with pytest.raises(ModelMismatchError, match=told):
        check_source(Path("other.onnx"), network(1), tmp_path, names, Path("/models/own.onnx"))
    with pytest.raises(ModelMismatchError, match="those of the original model, which"):
        check_source(Path("other.onnx"), network(1), tmp_path, names, None)


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_the_source_outlives_a_hub_that_resumes_from_the_folder(settings):
    first = built(network(0), **settings)
    again = built(first.forward, **settings)
    assert again.forward == first.forward
    assert source_in(again.graph) == source_in(first.graph) != source_in(built(network(1), **settings).graph)


@pytest.mark.parametrize(("way", "names"), [("adapted", False), ("quantized", False), ("both", True)])
def test_an_exported_model_names_its_source_while_it_has_adapters(way, names):
    """Another run may train the arrays of a merged model, so it is a source of its own."""
    graph = built(network(0), **WAYS[way])
    exported = export_model(graph.forward, graph.spec.views(graph.initial))
    assert (source_in(exported) == source_in(graph.graph)) == names
    assert (SOURCE in {entry.key for entry in onnx.load_model_from_string(exported).metadata_props}) == names


def test_a_run_without_a_training_graph_accepts_any_model(tmp_path):
    check_source(Path("any.onnx"), network(0), tmp_path, (), None)
    (tmp_path / FORWARD_FILE).write_bytes(network(0))
    assert held_forward(tmp_path) == network(0)
    (tmp_path / TRAINING_FILE).write_bytes(built(network(0)).graph)
    with pytest.raises(StorageError, match=rf"{TRAINING_FILE}: damaged"):
        held_forward(tmp_path)
