"""Models of `edgeasync.nn` with random parameters, and what onnxruntime makes of them."""

import numpy as np
import onnxruntime
from onnx import numpy_helper

from edgeasync import nn


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
