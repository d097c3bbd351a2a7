"""Normalizations, against references in numpy."""

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.errors import ConfigError
from tests.support.models.layers import (
    along,
    check_layer,
    check_shape_refused,
    parameters,
)


def normalized(x, axes, eps=1e-5):
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + eps)


def batch_norm(x, p):
    scale = along(p["0.weight"] / np.sqrt(p["0.running_var"] + 1e-5), x.ndim)
    return (x - along(p["0.running_mean"], x.ndim)) * scale + along(p["0.bias"], x.ndim)


LAYERS = [
    (nn.BatchNorm1d(3), (3,), batch_norm),
    (nn.BatchNorm1d(3), (3, 4), batch_norm),
    (nn.BatchNorm2d(3), (3, 4, 5), batch_norm),
    (nn.LayerNorm(5), (4, 5), lambda x, p: normalized(x, -1) * p["0.weight"] + p["0.bias"]),
    (
        nn.LayerNorm((4, 5), eps=0.1),
        (3, 4, 5),
        lambda x, p: normalized(x, (-2, -1), 0.1) * p["0.weight"] + p["0.bias"],
    ),
    (
        nn.InstanceNorm2d(3),
        (3, 4, 5),
        lambda x, p: normalized(x, (2, 3)) * along(p["0.weight"], 4) + along(p["0.bias"], 4),
    ),
]


@pytest.mark.parametrize(("layer", "dims", "reference"), LAYERS, ids=lambda case: type(case).__name__)
def test_a_layer_computes_what_it_says(layer, dims, reference):
    check_layer(layer, dims, reference)


def test_a_batch_normalization_keeps_the_share_that_torch_means():
    proto = nn.to_onnx(nn.BatchNorm1d(3, eps=0.5, momentum=0.25), (3,))
    (node,) = proto.graph.node
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    assert attributes == {"epsilon": 0.5, "momentum": 0.75, "training_mode": 0}
    assert {name: values.tolist() for name, values in parameters(proto).items()} == {
        "0.weight": [1, 1, 1],
        "0.bias": [0, 0, 0],
        "0.running_mean": [0, 0, 0],
        "0.running_var": [1, 1, 1],
    }


@pytest.mark.parametrize(
    ("layers", "dims", "sentence"),
    [
        (
            [nn.BatchNorm1d(3)],
            (3, 4, 4),
            "0 BatchNorm1d got [batch, 3, 4, 4], but needs [batch, 3] or [batch, 3, length]",
        ),
        (
            [nn.BatchNorm2d(3)],
            (4, 4, 3),
            "0 BatchNorm2d got [batch, 4, 4, 3], but needs [batch, 3, height, width]",
        ),
        ([nn.LayerNorm((2, 3))], (3,), "0 LayerNorm got [batch, 3], but needs [batch, ..., 2, 3]"),
        ([nn.InstanceNorm2d(3)], (3,), "0 InstanceNorm2d got [batch, 3], but needs [batch, 3, height, width]"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_layer_s_path(layers, dims, sentence):
    check_shape_refused(layers, dims, sentence)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.BatchNorm1d(3, eps=0.0), "BatchNorm1d: eps is 0.0; pass a number above 0 and below 1"),
        (lambda: nn.BatchNorm2d(3, momentum=None), "BatchNorm2d: momentum is None"),
        (lambda: nn.LayerNorm(()), "LayerNorm: normalized_shape is (); pass at least one size"),
        (lambda: nn.LayerNorm((3, 0)), "LayerNorm: normalized_shape is (3, 0)"),
        (lambda: nn.InstanceNorm2d(0), "InstanceNorm2d: num_features is 0"),
    ],
)
def test_a_wrong_argument_is_refused(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)
