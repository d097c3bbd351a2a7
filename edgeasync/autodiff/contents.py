"""What a model file contains. This module does not import `onnx`."""

import msgspec

SOURCE = "edgeasync.source"
"""Metadata key with the checksum of the frozen values of the model that a training graph or a forward
model was made from.
"""


class TensorInfo(msgspec.Struct, frozen=True):
    """An input or output: its name, dtype and shape.

    A dynamic size of the shape is a name, or empty. The shape is null if the file does not state
    it. The dtype of a value that is not a tensor is `sequence`, `map` or `optional`.
    """

    name: str
    dtype: str
    shape: list[int | str] | None


class ModelContents(msgspec.Struct, frozen=True):
    """The contents of a model file, whether or not it can be trained.

    `weights` is the number of float32 values in its initializers. `operators` counts the nodes by
    operator, the most frequent first. If the file cannot be trained, `without_gradient` counts the
    nodes whose operator has no gradient rule. Such a node prevents training only if it comes after
    a trained parameter.
    """

    opset: int
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    weights: int
    operators: dict[str, int]
    without_gradient: dict[str, int]
