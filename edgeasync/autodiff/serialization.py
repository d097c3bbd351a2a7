"""Reads and writes serialized models without copying the values of their large constants."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from edgeasync.autodiff.graph import Array, tensor
from edgeasync.protocol.protobuf import header, message, raw_fields
from edgeasync.protocol.wire import Buffer

LARGE_BYTES_MIN = 1 << 20
"""Minimum size of a large constant."""

_MODEL_GRAPH, _GRAPH_INITIALIZER, _RAW_DATA = 7, 5, 9
"""Field numbers of `onnx.proto`."""


class Detached(NamedTuple):
    """A model whose large initializers have no values, and these values by name, as views."""

    model: onnx.ModelProto
    values: dict[str, Array]


def serialize(model: onnx.ModelProto, constants: Mapping[str, Array]) -> bytes:
    """Serialize a model with `constants` as further initializers. Their values are copied once."""
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    parts: list[Buffer] = [model.graph.SerializeToString()]
    parts += [part for name, value in constants.items() for part in _initializer(name, value)]
    return b"".join([rest.SerializeToString(), header(_MODEL_GRAPH, sum(map(len, parts))), *parts])


def _initializer(name: str, value: Array) -> list[Buffer]:
    if value.dtype.isbuiltin != 1 or value.dtype.kind == "O":  # values that numpy stores in another form
        return [message(_GRAPH_INITIALIZER, tensor(name, value).SerializeToString())]
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    start = onnx.TensorProto(name=name, data_type=kind, dims=value.shape).SerializeToString()
    start += header(_RAW_DATA, value.nbytes)
    little_endian = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    values = little_endian.reshape(-1).view(np.uint8).data
    return [header(_GRAPH_INITIALIZER, len(start) + value.nbytes), start, values]


def is_large(dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> bool:
    """Return whether a constant is so large that it must not be copied.

    Vectors are not, because a BatchNormalization in training mode overwrites statistics that are
    inputs. Neither are types that numpy does not have, such as int4.
    """
    return len(shape) > 1 and math.prod(shape) * dtype.itemsize >= LARGE_BYTES_MIN and dtype.isbuiltin == 1


def detach(model: bytes) -> Detached:
    """Parse a serialized model without copying the values of its large initializers.

    Raises protobuf's or numpy's error, or `GraphError`, if the bytes are not a model.
    """
    values: dict[str, Array] = {}
    parts = list[Buffer]()
    for number, whole, content in raw_fields(memoryview(model)):
        parts.append(message(number, b"".join(_light(content, values))) if number == _MODEL_GRAPH else whole)
    return Detached(onnx.load_model_from_string(b"".join(parts)), values)


def _light(graph: memoryview, values: dict[str, Array]) -> Iterator[Buffer]:
    """Yield the fields of a graph, and move the values of large initializers to `values`."""
    for number, whole, content in raw_fields(graph):
        tensor_fields = [*raw_fields(content)] if number == _GRAPH_INITIALIZER else []
        raw = next((value for field, _, value in tensor_fields if field == _RAW_DATA), b"")
        if len(raw) < LARGE_BYTES_MIN:
            yield whole
            continue
        rest = b"".join([part for field, part, _ in tensor_fields if field != _RAW_DATA])
        entry = onnx.TensorProto.FromString(rest)
        dtype, shape = np.dtype(helper.tensor_dtype_to_np_dtype(entry.data_type)), tuple(entry.dims)
        if not is_large(dtype, shape):
            yield whole
            continue
        values[entry.name] = np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape)
        yield message(_GRAPH_INITIALIZER, rest)
