"""The hub's side of a graph: what the run's folder keeps of it, and which run may be resumed."""

import numpy as np
import onnx
import pytest
import safetensors.numpy

from edgeasync import nn
from edgeasync.data.dataset import Dataset
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.errors import ConfigError, GraphError, ModelMismatchError, StorageError
from edgeasync.graphs.evaluation import make_evaluator
from edgeasync.graphs.graph_model import OnnxModel, build_graph, keep_files, load_graph
from edgeasync.graphs.source import with_forward
from edgeasync.training.onnx_trainer import OnnxTrainer
from edgeasync.training.plan import LocalTraining
from tests.support.models.gradients import forward, numbers
from tests.support.models.graphs import forward_model


def files(run):
    return {path.name: path.read_bytes() for path in run.iterdir()}


GRAPH, ANOTHER = [onnx.ModelProto(producer_name=name).SerializeToString() for name in ("graph", "another")]


def test_a_run_keeps_what_it_trains(tmp_path):
    for graph in (GRAPH, ANOTHER):
        keep_files(tmp_path, graph, b"forward")
        assert files(tmp_path) == {TRAINING_FILE: with_forward(graph, b"forward"), FORWARD_FILE: b"forward"}


def test_a_forward_model_that_was_edited_is_refused_until_it_is_written_again(tmp_path):
    first, other = [nn.to_onnx(nn.Linear(3, 2), (3,), seed=seed).SerializeToString() for seed in (0, 1)]
    keep_files(tmp_path, GRAPH, first, {"0.weight"})
    (tmp_path / FORWARD_FILE).write_bytes(other)
    held = files(tmp_path)
    for resumed in (other, None):
        with pytest.raises(StorageError, match=rf"{FORWARD_FILE}: damaged or edited after the run wrote it"):
            keep_files(tmp_path, GRAPH, resumed, {"0.weight"})
        assert files(tmp_path) == held
    keep_files(tmp_path, GRAPH, first, {"0.weight"})
    assert (tmp_path / FORWARD_FILE).read_bytes() == first


def test_a_forward_model_that_is_missing_is_written_again(tmp_path):
    keep_files(tmp_path, GRAPH, b"forward")
    held = files(tmp_path)
    (tmp_path / FORWARD_FILE).unlink()
    for resumed in (b"other", None):
        with pytest.raises(StorageError, match=rf"{FORWARD_FILE}: missing; restore the file, or start the hub"):
            keep_files(tmp_path, GRAPH, resumed)
    keep_files(tmp_path, GRAPH, b"forward")
    assert files(tmp_path) == held


@pytest.mark.parametrize("damaged", [GRAPH[:5], b"", b"\xff" * 20])
def test_a_training_graph_that_is_damaged_is_refused_until_it_is_removed(tmp_path, damaged):
    keep_files(tmp_path, GRAPH, b"forward")
    held = files(tmp_path)
    (tmp_path / TRAINING_FILE).write_bytes(damaged)
    with pytest.raises(StorageError, match=rf"{TRAINING_FILE}: damaged.*; remove the file, and start the hub"):
        keep_files(tmp_path, GRAPH, b"forward")
    (tmp_path / TRAINING_FILE).unlink()
    keep_files(tmp_path, GRAPH, b"forward")
    assert files(tmp_path) == held


def test_a_run_keeps_a_graph_that_was_built_before(tmp_path):
    for _ in range(2):
        keep_files(tmp_path, GRAPH, None)
        assert files(tmp_path) == {TRAINING_FILE: GRAPH}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((GRAPH, b"forward"), (GRAPH, ANOTHER)),
        ((GRAPH, b"forward"), (GRAPH, None)),
        ((GRAPH, None), (ANOTHER, None)),
        ((GRAPH, None), (GRAPH, b"forward")),
    ],
)
def test_another_model_is_refused_and_nothing_is_touched(tmp_path, before, now):
    keep_files(tmp_path, *before)
    held = files(tmp_path)
    with pytest.raises(ModelMismatchError, match="another run folder"):
        keep_files(tmp_path, *now)
    assert files(tmp_path) == held


def test_a_forward_model_becomes_a_graph(tmp_path):
    path = tmp_path / "forward.onnx"
    path.write_bytes(forward_model())
    loaded = load_graph(OnnxModel(file=str(path), train=("head.*",)))
    assert {parameter.name for parameter in loaded.spec.parameters} == {"head.weight", "head.bias"}
    assert len(loaded.initial) == loaded.spec.length
    assert loaded.forward == path.read_bytes()


def test_a_quantized_base_becomes_the_hubs_model(tmp_path):
    path = tmp_path / "forward.onnx"
    parameters = {"w": numbers((64, 64), 1), "head": numbers((64, 2), 2)}
    path.write_bytes(forward("h = MatMul(x, w)\ny = MatMul(h, head)", parameters, (64,)))
    model = OnnxModel(file=str(path), train=("head",), base="int8")
    loaded = load_graph(model)
    assert max(len(loaded.forward), len(loaded.graph)) < len(path.read_bytes()) / 2
    assert load_graph(model).forward == loaded.forward  # a run can be resumed
    data = Dataset.of(numbers((5, 64), 3), [0, 1, 1, 0, 1])
    trainer = OnnxTrainer(loaded.graph, loaded.spec, data, LocalTraining())
    evaluated = make_evaluator(model, loaded, data)(loaded.initial)
    assert evaluated.loss == pytest.approx(trainer.evaluate(loaded.initial, data).loss, rel=1e-5)


def test_a_graph_that_was_built_before_is_shipped_as_it_is(tmp_path):
    (tmp_path / "forward.onnx").write_bytes(forward_model())
    built = load_graph(OnnxModel(file=str(tmp_path / "forward.onnx")))
    prebuilt = tmp_path / "training.onnx"
    prebuilt.write_bytes(built.graph)
    with pytest.raises(ConfigError, match=r"training\.safetensors: no such file"):
        load_graph(OnnxModel(file=str(prebuilt)))
    safetensors.numpy.save_file(dict(built.spec.views(built.initial)), tmp_path / "training.safetensors")
    loaded = load_graph(OnnxModel(file=str(prebuilt)))
    assert (loaded.graph, loaded.spec, loaded.forward) == (built.graph, built.spec, None)
    assert np.array_equal(loaded.initial, built.initial)
    with pytest.raises(ConfigError, match="loss has no effect"):
        load_graph(OnnxModel(file=str(prebuilt), loss="mse"))
    (tmp_path / "training.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_graph(OnnxModel(file=str(prebuilt)))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_graph(OnnxModel(file=str(tmp_path / "none.onnx")))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_graph(OnnxModel(file=str(tmp_path)))
    (tmp_path / "torn.onnx").write_bytes(b"torn")
    with pytest.raises(GraphError, match=r"torn\.onnx: "):
        load_graph(OnnxModel(file=str(tmp_path / "torn.onnx")))


def test_a_run_resumes_with_other_first_values_but_not_with_other_constants(tmp_path):
    first, other = [nn.to_onnx(nn.Linear(3, 2), (3,), seed=seed).SerializeToString() for seed in (0, 1)]
    keep_files(tmp_path, GRAPH, first, {"0.weight", "0.bias"})
    keep_files(tmp_path, GRAPH, other, {"0.weight", "0.bias"})
    assert (tmp_path / FORWARD_FILE).read_bytes() == first
    for content, names in (
        (other, {"0.bias"}),
        (nn.to_onnx(nn.Linear(3, 3), (3,)).SerializeToString(), {"0.weight"}),
    ):
        with pytest.raises(ModelMismatchError, match="started with another model"):
            keep_files(tmp_path, GRAPH, content, names)


def test_values_that_are_not_trained_have_a_checksum():
    """Peers compare it: each reads a file of its own."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def frozen_of(seed, **chosen):
        forward = nn.to_onnx(layers, (3,), seed=seed).SerializeToString()
        return build_graph(forward, OnnxModel(file="", **chosen), "the model").frozen

    assert frozen_of(0) is None
    head, same, other = (frozen_of(seed, train=["2.*"]) for seed in (0, 0, 1))
    assert head.framework == "onnx"
    assert head == same != other
    assert frozen_of(0, train=["0.*"]) not in (None, head)
