"""Converts a description of layers to an ONNX model."""

from collections.abc import Sequence
from pathlib import Path

import onnx

from edgeasync.errors import ConfigError, StorageError
from edgeasync.nn.containers import Sequential
from edgeasync.nn.graph import INPUT, LayerGraph, Value
from edgeasync.nn.layer import Layer, is_integer


def to_onnx(model: Layer, input_shape: Sequence[int], *, seed: int = 0) -> onnx.ModelProto:
    """Return the forward model with random parameters. The same seed gives the same bytes.

    The input is `x`, (batch, input_shape...), int64 if the model starts with an Embedding,
    otherwise float32. The output is `scores`, (batch, ...), float32. Initializers are the layers'
    parameters and running statistics, named by path, such as `0.weight`. A single layer is named as
    if it were in a Sequential.

    Raises `ConfigError`, which contains the path of the layer, if a layer does not accept its
    input.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Linear(64, 10), (64,))
    >>> [tensor.name for tensor in model.graph.initializer]
    ['0.weight', '0.bias']
    """
    if not isinstance(model, Layer):
        raise ConfigError(f"the model is {model!r}; pass a layer such as Sequential(...)")
    dims = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if not dims or not all(is_integer(dim, 1) for dim in dims):
        wanted = "the sizes of one example as a tuple, without the batch, each at least 1"
        raise ConfigError(f"input_shape is {input_shape!r}; pass {wanted}")
    if not is_integer(seed, 0):
        raise ConfigError(f"seed is {seed!r}; pass an integer of at least 0")
    layers = model if isinstance(model, Sequential) else Sequential(model)
    graph = LayerGraph(int(seed))
    x = Value(INPUT, tuple([int(dim) for dim in dims]), layers.input_type or "float32")
    return graph.model(x, layers.place(graph, "", x))


def save(model: Layer, path: str | Path, input_shape: Sequence[int], *, seed: int = 0) -> None:
    """Write the model that `to_onnx` returns to a file. Raises `ConfigError` or `StorageError`.

    >>> from edgeasync import nn
    >>> nn.save(nn.Linear(64, 10), "linear.onnx", (64,))
    """
    content = to_onnx(model, input_shape, seed=seed).SerializeToString(deterministic=True)
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; choose another path") from error
