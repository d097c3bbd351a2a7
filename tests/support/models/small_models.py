"""Small models as text, and a check that a model is refused."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import forward, numbers

MSE = GraphSettings(loss="mse")
DENSE = "h = Gemm(x, w1, b1)\na = Relu(h)\ny = Gemm(a, w2, b2)"


def dense(**more):
    return {
        "w1": numbers((4, 5), 1),
        "b1": numbers((5,), 2),
        "w2": numbers((5, 3), 3),
        "b2": numbers((3,), 4),
    } | more


def model(text=DENSE, parameters=None, x=(4,), **options):
    return forward(text, dense() if parameters is None else parameters, x, **options)


def of_one_size(batch, w):
    """Return a linear model whose batch size cannot be freed, because it adds 0 times the batch's mean."""
    text = "a = MatMul(x, w)\nm = ReduceMean(a, first)\nn = Mul(m, nought)\ny = Add(a, n)"
    constants = {"first": np.array([0]), "nought": np.float32(0)}
    return forward(text, {"w": w} | constants, w.shape[:1], batch=batch)


def edited(data, edit):
    proto = onnx.load_model_from_string(data)
    edit(proto)
    return proto.SerializeToString()


def names(graph):
    return [entry.name for entry in graph.spec.parameters]


def refused(data, why, **settings):
    with pytest.raises(GraphError, match=why) as caught:
        build_training_graph(data, GraphSettings(**{"loss": "mse"} | settings))
    assert "\n" not in str(caught.value)


def frozen(*names):
    return edited(model(), lambda proto: proto.metadata_props.add(key="edgeasync.frozen", value=json.dumps(names)))


def noted(data, **notes):
    """Return a model with the notes that torch's newer exporter makes of tensors."""

    def edit(proto):
        proto.producer_name = "pytorch"
        for name, (key, value) in notes.items():
            info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            info.metadata_props.add(key=f"pkg.{key}", value=value)
            proto.graph.value_info.append(info)

    return edited(data, edit)


KIND, FOLDED_FROM = "torch.export.graph_signature.InputSpec.kind", "onnxscript.optimizer.folded_from"
