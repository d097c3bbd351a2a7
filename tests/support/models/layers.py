"""Models of `edgeasync.nn` with random parameters, run by onnxruntime and compared with numpy."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from edgeasync import nn
from edgeasync.errors import ConfigError


def numbers(shape, seed=0):
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape).astype(np.float32)


def parameters(proto):
    return {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}


def randomized(model, input_shape):
    """Return the model with every parameter away from its first value, so that no parameter is overlooked."""
    proto = nn.to_onnx(model, input_shape, seed=1)
    for place, entry in enumerate(proto.graph.initializer):
        values = 0.5 * numbers(tuple(entry.dims), place + 100)
        if entry.name.endswith("running_var"):
            values = np.abs(values) + 0.5
        entry.CopyFrom(numpy_helper.from_array(values, entry.name))
    return proto


def run(proto, x):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(["scores"], {"x": x})[0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def along(values, rank):
    """One value for each channel, to broadcast over (batch, channels, ...)."""
    return values.reshape(1, -1, *[1] * (rank - 2))


def check_layer(layer, dims, reference):
    proto = randomized(layer, dims)
    onnx.checker.check_model(proto, full_check=True)
    declared = [dim.dim_param or dim.dim_value for dim in proto.graph.output[0].type.tensor_type.shape.dim]
    for rows in (1, 5):
        x = numbers((rows, *dims))
        result = run(proto, x)
        expected = reference(x.astype(np.float64), parameters(proto))
        assert result.dtype == np.float32
        assert result.shape == expected.shape
        assert declared == ["batch", *result.shape[1:]]
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


def computes(cases):
    """Return a test that each layer computes, for examples of some shape, what its reference in numpy does."""

    @pytest.mark.parametrize(("layer", "dims", "reference"), cases, ids=lambda case: type(case).__name__)
    def test(layer, dims, reference):
        check_layer(layer, dims, reference)

    return test


def refuses_shapes(*cases):
    """Return a test that layers refuse examples of some shape with a sentence that has the layer's path."""

    @pytest.mark.parametrize(("layers", "dims", "sentence"), cases)
    def test(layers, dims, sentence):
        with pytest.raises(ConfigError) as caught:
            nn.to_onnx(nn.Sequential(*layers), dims)
        assert sentence in str(caught.value)

    return test


def refuses_arguments(*cases):
    """Return a test that what makes a layer refuses its arguments with a sentence."""

    @pytest.mark.parametrize(("make", "sentence"), cases)
    def test(make, sentence):
        with pytest.raises(ConfigError) as caught:
            make()
        assert sentence in str(caught.value)

    return test
