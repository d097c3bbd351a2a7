"""Normalizations, against references in numpy."""

import numpy as np
import onnx

from edgeasync import nn
from tests.support.models.layers import along, computes, parameters, refuses_arguments, refuses_shapes


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

test_a_layer_computes_what_it_says = computes(LAYERS)


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


test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
    (
        [nn.BatchNorm1d(3)],
        (3, 4, 4),
        "0 BatchNorm1d got [batch, 3, 4, 4], but needs [batch, 3] or [batch, 3, length]",
    ),
    ([nn.BatchNorm2d(3)], (4, 4, 3), "0 BatchNorm2d got [batch, 4, 4, 3], but needs [batch, 3, height, width]"),
    ([nn.LayerNorm((2, 3))], (3,), "0 LayerNorm got [batch, 3], but needs [batch, ..., 2, 3]"),
    ([nn.InstanceNorm2d(3)], (3,), "0 InstanceNorm2d got [batch, 3], but needs [batch, 3, height, width]"),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (lambda: nn.BatchNorm1d(3, eps=0.0), "BatchNorm1d: eps is 0.0; pass a number above 0 and below 1"),
    (lambda: nn.LayerNorm(()), "LayerNorm: normalized_shape is (); pass at least one size"),
    (lambda: nn.InstanceNorm2d(0), "InstanceNorm2d: num_features is 0"),
)
