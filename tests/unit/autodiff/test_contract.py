"""The interface of a training graph: inputs, outputs, metadata and names."""

import json

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.contract import is_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.losses import CrossEntropy
from tests.support.models.gradients import session
from tests.support.models.small_models import dense, edited, model, refused


@pytest.mark.parametrize("batch", ["batch", "", 4])
def test_the_inputs_outputs_and_metadata_of_a_training_graph(batch):
    graph = build_training_graph(model(batch=batch), GraphSettings())
    opened = session(graph.model)
    rows = "batch"  # of a file with a fixed size, too
    shapes = {"w1": [4, 5], "b1": [5], "w2": [5, 3], "b2": [3]}
    assert [(entry.name, entry.type, entry.shape) for entry in opened.get_inputs()] == [
        ("x", "tensor(float)", [rows, 4]),
        ("target", "tensor(int64)", [rows]),
        *[(name, "tensor(float)", shape) for name, shape in shapes.items()],
    ]
    assert [(entry.name, entry.type, entry.shape) for entry in opened.get_outputs()] == [
        ("loss", "tensor(float)", []),
        ("loss_weight", "tensor(float)", []),
        ("y", "tensor(float)", [rows, 3]),
        *[(f"{name}.grad", "tensor(float)", shape) for name, shape in shapes.items()],
    ]
    assert opened.get_modelmeta().custom_metadata_map == {
        "edgeasync.contract": "2",
        "edgeasync.output": "y",
        "edgeasync.target": "label",
        "edgeasync.loss": '{"kind":"cross_entropy","class_weights":null,"label_smoothing":0.0,'
        '"ignored_label":null}',
        "edgeasync.classes": "3",
    }
    assert {entry.name: list(entry.shape) for entry in graph.spec.parameters} == shapes
    for name, value in graph.spec.views(graph.initial).items():
        np.testing.assert_array_equal(value, dense()[name])


def test_a_training_graph_is_known_for_one_and_is_not_differentiated_again():
    graph = build_training_graph(model(), GraphSettings())
    assert is_training_graph(graph.model)
    assert not is_training_graph(model())
    assert not is_training_graph(b"no model at all")
    with pytest.raises(GraphError, match="already a training graph; pass the forward model"):
        build_training_graph(graph.model, GraphSettings())


def test_a_weighted_loss_is_in_the_metadata():
    setting = GraphSettings(loss=CrossEntropy(class_weights=(1.0, 2.0, 0.5), ignored_label=255))
    found = session(build_training_graph(model(), setting).model).get_modelmeta().custom_metadata_map
    assert json.loads(found["edgeasync.loss"])["class_weights"] == [1.0, 2.0, 0.5]
    assert found["edgeasync.ignored_label"] == "255"


@pytest.mark.parametrize(
    ("name", "clash"),
    [("loss", "h"), ("target", "h"), ("loss_weight", "h"), ("w1.grad", "h"), ("target", "x"), ("loss", "b1")],
)
def test_names_that_the_contract_needs(name, clash):
    def rename(proto):
        for node in proto.graph.node:
            node.input[:] = [name if old == clash else old for old in node.input]
            node.output[:] = [name if old == clash else old for old in node.output]
        for entry in (*proto.graph.input, *proto.graph.initializer, *proto.graph.value_info):
            entry.name = name if entry.name == clash else entry.name

    why = f"tensor name '{name}' is reserved for the training graph; rename it"
    refused(edited(model(), rename), why, loss="cross_entropy")
