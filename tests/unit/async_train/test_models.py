"""Model zoo: sizes, and where pretrained models are looked up."""

import math

import numpy as np
import pytest

from edgeasync import nn as layers
from edgeasync.async_train import models, nn
from edgeasync.errors import ConfigError


def test_a_residual_network_of_50_layers():
    graph = layers.to_onnx(models.resnet50(classes=10, side=32).layers, (3, 32, 32)).graph
    statistics = [tensor for tensor in graph.initializer if "running" in tensor.name]
    trained = [tensor for tensor in graph.initializer if "running" not in tensor.name]
    # He et al. have 25.6 million with 1000 classes, of which a class has 2049 in the last layer.
    assert sum(math.prod(tensor.dims) for tensor in trained) == 25_557_032 - 990 * 2049
    assert len(statistics) == 2 * 53
    assert [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim] == [0, 10]


def test_a_pretrained_model_is_looked_for_where_the_error_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"resnet50\.onnx: no such file; store an ONNX file of ResNet-50 there"):
        models.resnet50(pretrained=True)
    path = tmp_path / ".cache/edgeasync/models/resnet50.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(nn.Sequential(nn.Linear(4, 2)).SerializeToString())
    assert models.resnet50(pretrained=True)(np.zeros((1, 4))).shape == (1, 2)
