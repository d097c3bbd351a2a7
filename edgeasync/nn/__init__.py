"""Builds ONNX forward models without torch. Needs the `onnx` package.

    >>> from edgeasync import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    ...     nn.Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    ...     nn.Flatten(), nn.Linear(8 * 4 * 4, 10),
    ... )
    >>> nn.save(model, "digits.onnx", input_shape=(1, 8, 8), seed=0)

Layers have the same names, arguments and parameter names as in torch. A layer is only a
description, which can be compared and reused. Shapes are checked when the model is built.
"""

from edgeasync.nn.attention import SelfAttention
from edgeasync.nn.basic import (
    GELU,
    Dropout,
    Embedding,
    Flatten,
    Hardswish,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MeanOverTime,
    Permute,
    PositionEmbedding,
    ReLU,
    Reshape,
    Sigmoid,
    Softmax,
    Tanh,
)
from edgeasync.nn.build import save, to_onnx
from edgeasync.nn.containers import Residual, Sequential
from edgeasync.nn.convolution import (
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    GlobalAvgPool,
    MaxPool1d,
    MaxPool2d,
    Upsample,
)
from edgeasync.nn.layer import Layer
from edgeasync.nn.normalization import BatchNorm1d, BatchNorm2d, InstanceNorm2d, LayerNorm
from edgeasync.nn.recurrent import GRU, LSTM

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool",
    "Hardswish",
    "InstanceNorm2d",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MeanOverTime",
    "Permute",
    "PositionEmbedding",
    "ReLU",
    "Reshape",
    "Residual",
    "SelfAttention",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "Upsample",
    "save",
    "to_onnx",
]
