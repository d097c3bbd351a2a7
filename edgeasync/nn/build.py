"""Build and save an ONNX model from layers."""

from collections.abc import Sequence
from pathlib import Path

import onnx

from edgeasync.errors import ConfigError, StorageError
from edgeasync.nn.containers import Sequential
from edgeasync.nn.graph import INPUT, LayerGraph, Value
from edgeasync.nn.layer import Layer, is_integer


def to_onnx(model: Layer, input_shape: Sequence[int], *, seed: int = 0) -> onnx.ModelProto:
    """Build the forward model with random initial parameters.

    The same seed returns the same bytes on every machine. `input_shape` is the shape of one
    example, without the batch.

    The model's input `x` has shape (batch, input_shape...). It is int64 if the model starts with an
    Embedding, else float32. The output `scores` is float32 (batch, ...). The initializers are the
    layers' parameters and running statistics, named by the path of their layer, such as `0.weight`.
    A single layer is wrapped in a Sequential, so its path is `0`.

    Raises `ConfigError` if a layer does not accept its input's shape or type. The message names the
    layer's path.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Linear(64, 10), (64,))
    >>> [tensor.name for tensor in model.graph.initializer]
    ['0.weight', '0.bias']
    """
    if not isinstance(model, Layer):
        raise ConfigError(f"model is {model!r}, not a layer; pass a layer such as Sequential(...)")
    dims = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if not dims or not all(is_integer(dim, 1) for dim in dims):
        wanted = "the shape of one example as a tuple of positive integers, without the batch"
        raise ConfigError(f"input_shape is {input_shape!r}; pass {wanted}")
    if not is_integer(seed, 0):
        raise ConfigError(f"seed is {seed!r}; pass an integer of 0 or more")
    layers = model if isinstance(model, Sequential) else Sequential(model)
    graph = LayerGraph(int(seed))
    x = Value(INPUT, tuple([int(dim) for dim in dims]), layers.input_type or "float32")
    return graph.model(x, layers.place(graph, "", x))


def save(model: Layer, path: str | Path, input_shape: Sequence[int], *, seed: int = 0) -> None:
    """Build a model as `to_onnx` does, and write it to the file `path`.

    Raises `ConfigError` as `to_onnx` does, and `StorageError` if the file cannot be written.

    >>> from edgeasync import nn
    >>> nn.save(nn.Linear(64, 10), "linear.onnx", (64,))
    """
    content = to_onnx(model, input_shape, seed=seed).SerializeToString(deterministic=True)
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; choose another path") from error
