"""Training graphs that compute norms and activations twice: the same gradients in less memory."""

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.inspection import inspect_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward, numbers, run


def norm(name, channels):
    return {
        f"{name}.scale": numbers((channels,), 1, positive=True),
        f"{name}.bias": numbers((channels,), 2),
        f"{name}.mean": numbers((channels,), 3),
        f"{name}.var": numbers((channels,), 4, positive=True),
    }


def batch_norm(y, x, name):
    return f"{y} = BatchNormalization({x}, {', '.join(norm(name, 1))})"
