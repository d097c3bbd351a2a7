"""Self-attention, against a reference in numpy."""

import math

import numpy as np

from edgeasync import nn
from tests.support.models.layers import computes, refuses_arguments, refuses_shapes, softmax


def attended(x, p, heads):
    batch, time, width = x.shape
    projected = x @ p["0.in_proj_weight"].T + p["0.in_proj_bias"]
    apart = [part.reshape(batch, time, heads, -1).transpose(0, 2, 1, 3) for part in np.split(projected, 3, 2)]
    query, key, value = apart
    weights = softmax(query @ key.swapaxes(2, 3) / math.sqrt(width // heads))
    merged = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, time, width)
    return merged @ p["0.out_proj.weight"].T + p["0.out_proj.bias"]


LAYERS = [
    (nn.SelfAttention(6, 3), (4, 6), lambda x, p: attended(x, p, 3)),
    (nn.SelfAttention(5, 1), (1, 5), lambda x, p: attended(x, p, 1)),
]

test_a_layer_computes_what_it_says = computes(LAYERS)

test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
    ([nn.SelfAttention(4, 2)], (4,), "0 SelfAttention got [batch, 4], but needs [batch, time, 4]"),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (lambda: nn.SelfAttention(6, 4), "SelfAttention: heads is 4; pass a divisor of width 6"),
)
