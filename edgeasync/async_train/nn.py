"""Layers, callable models, and losses.

The layers are those of `edgeasync.nn`, which do not store values; `Sequential` builds a model that
stores the values of its layers. Layers need the `onnx` package, losses do not.

    >>> import numpy as np
    >>> from edgeasync.async_train import nn
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> model(np.zeros((5, 64))).shape
    (5, 10)
"""

from typing import TYPE_CHECKING, Any

from edgeasync.async_train.loss_functions import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
)

if TYPE_CHECKING:
    from edgeasync.async_train.model import Model, Sequential
    from edgeasync.nn import (
        GELU,
        GRU,
        LSTM,
        AvgPool2d,
        BatchNorm1d,
        BatchNorm2d,
        Conv1d,
        Conv2d,
        Dropout,
        Embedding,
        Flatten,
        GlobalAvgPool,
        LayerNorm,
        LeakyReLU,
        Linear,
        MaxPool1d,
        MaxPool2d,
        ReLU,
        Reshape,
        Residual,
        Sigmoid,
        Softmax,
        Tanh,
    )

_MODELS = ("Model", "Sequential")

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool",
    "HuberLoss",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "Model",
    "ReLU",
    "Reshape",
    "Residual",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        from edgeasync.async_train import model  # noqa: PLC0415 - needs onnx

        return getattr(model, name)
    if name.startswith("_"):
        raise AttributeError(name)
    from edgeasync import nn  # noqa: PLC0415 - needs onnx

    if name not in nn.__all__ or name in ("save", "to_onnx"):
        raise AttributeError(
            f"module {__name__!r} has no {name!r}; it has {', '.join(__dir__())}. For other layers use "
            "a torch.nn.Module or an ONNX file"
        )
    return getattr(nn, name)


def __dir__() -> list[str]:
    return __all__
