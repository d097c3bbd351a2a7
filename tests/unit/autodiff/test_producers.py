"""Recognizing the exporter of a model, and the advice for each."""

import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.producers import PRODUCERS, kind_of_producer
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.exported import FILES, written


def test_which_exporter_wrote_a_file():
    kinds = {name: kind_of_producer(make()) for name, (make, _, _) in FILES.items()}
    expected = {name: name.split(",")[0].split(" ")[0] for name in FILES} | {"nbits": ""}
    assert kinds == expected
    assert {*expected.values()} >= {*PRODUCERS}
    assert kind_of_producer(written("y = Relu(x)", {}, producer="PaddlePaddle")) == "paddle2onnx"
    quantized = onnx.ModelProto(producer_name="onnx.quantize", graph=onnx.GraphProto())
    assert kind_of_producer(quantized) == "onnxruntime"


@pytest.mark.parametrize(
    "name", [name for name in FILES if "," not in name and " " not in name and name != "nbits"]
)
def test_advice_is_that_of_the_exporter(name):
    proto = FILES[name][0]()
    proto.graph.input[0].type.tensor_type.shape.dim[-1].dim_param = "length"
    advice = PRODUCERS[name]
    with pytest.raises(GraphError) as told:
        build_training_graph(proto.SerializeToString(), GraphSettings(**FILES[name][1] | FILES[name][2]))
    assert str(told.value).endswith(advice.sizes)
    proto.opset_import[0].version = 99
    with pytest.raises(GraphError) as told:
        build_training_graph(proto.SerializeToString(), GraphSettings())
    assert advice.opset in str(told.value) or "not a readable ONNX model" in str(told.value)
