"""Dense, elementwise and reshaping layers, against references in numpy."""

import math

import numpy as np
import onnx

from edgeasync import nn
from tests.support.models.layers import (
    computes,
    parameters,
    refuses_arguments,
    refuses_shapes,
    run,
    sigmoid,
    softmax,
)


def gelu(x, p):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ELEMENTWISE = [
    (nn.ReLU(), lambda x, p: np.maximum(x, 0)),
    (nn.LeakyReLU(0.2), lambda x, p: np.where(x > 0, x, 0.2 * x)),
    (nn.Sigmoid(), lambda x, p: sigmoid(x)),
    (nn.Tanh(), lambda x, p: np.tanh(x)),
    (nn.GELU(), gelu),
    (nn.Hardswish(), lambda x, p: x * np.clip(x + 3, 0, 6) / 6),
    (nn.Softmax(), lambda x, p: softmax(x)),
    (nn.Softmax(dim=1), lambda x, p: softmax(x, 1)),
    (nn.LogSoftmax(dim=-2), lambda x, p: np.log(softmax(x, -2))),
    (nn.Dropout(0.9), lambda x, p: x),
]

LAYERS = [
    *[(layer, (3, 4), reference) for layer, reference in ELEMENTWISE],
    (nn.Flatten(), (2, 3, 4), lambda x, p: x.reshape(len(x), 24)),
    (nn.Flatten(), (3,), lambda x, p: x),
    (nn.Reshape(4, -1), (2, 3, 4), lambda x, p: x.reshape(len(x), 4, 6)),
    (nn.Reshape(24), (2, 3, 4), lambda x, p: x.reshape(len(x), 24)),
    (nn.Permute(0, 3, 1, 2), (2, 3, 4), lambda x, p: x.transpose(0, 3, 1, 2)),
    (nn.MeanOverTime(), (5, 3), lambda x, p: x.mean(1)),
    (nn.Linear(3, 2), (3,), lambda x, p: x @ p["0.weight"].T + p["0.bias"]),
    (nn.Linear(3, 2), (5, 3), lambda x, p: x @ p["0.weight"].T + p["0.bias"]),
    (nn.Linear(3, 2, bias=False), (4, 5, 3), lambda x, p: x @ p["0.weight"].T),
    (nn.PositionEmbedding(5, 3), (5, 3), lambda x, p: x + p["0.weight"]),
]

test_a_layer_computes_what_it_says = computes(LAYERS)


def test_an_embedding_takes_class_numbers():
    proto = nn.to_onnx(nn.Sequential(nn.Flatten(), nn.Embedding(7, 3)), (2, 2), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    x = np.array([[[0, 6], [3, 3]]])
    assert np.array_equal(run(proto, x), parameters(proto)["1.weight"][x.reshape(1, 4)])


test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
    ([nn.Flatten(), nn.Linear(5, 2)], (2, 3), "1 Linear got [batch, 6], but needs [batch, ..., 5]"),
    (
        [nn.Residual(nn.Tanh(), shortcut=nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))],
        (3,),
        "0.shortcut.1 Linear got [batch, 3], but needs",
    ),
    (
        [nn.Embedding(5, 2), nn.Embedding(5, 2)],
        (3,),
        "1 Embedding got [batch, 3, 2], but needs int64 values, not float32",
    ),
    ([nn.Reshape(3), nn.Embedding(5, 2), nn.Linear(3, 3)], (3,), "2 Linear got [batch, 3, 2]"),
    ([nn.PositionEmbedding(4, 3)], (5, 3), "0 PositionEmbedding got [batch, 5, 3], but needs [batch, 4, 3]"),
    ([nn.MeanOverTime()], (5,), "0 MeanOverTime got [batch, 5], but needs [batch, time, ...]"),
    ([nn.Softmax(2)], (5,), "0 Softmax got [batch, 5], but needs an input in which dim 2 is an axis other"),
    (
        [nn.LogSoftmax(-2)],
        (5,),
        "0 LogSoftmax got [batch, 5], but needs an input in which dim -2 is an axis other",
    ),
    ([nn.Reshape(2, 3)], (5,), "0 Reshape got [batch, 5], but needs 6 values per example, not 5"),
    (
        [nn.Reshape(-1, 2)],
        (5,),
        "0 Reshape got [batch, 5], but needs a multiple of 2 values per example, not 5",
    ),
    ([nn.Permute(0, 2, 1)], (5,), "0 Permute got [batch, 5], but needs 3 axes, including the batch"),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (lambda: nn.Linear(0, 2), "Linear: in_features is 0; pass an integer of at least 1"),
    (lambda: nn.Linear(2, 2, 1), "Linear: bias is 1; pass True or False"),
    (lambda: nn.LeakyReLU(-0.1), "LeakyReLU: negative_slope is -0.1; pass a number of at least 0"),
    (lambda: nn.Dropout(1.0), "Dropout: p is 1.0; pass a number of at least 0 and below 1"),
    (nn.Reshape, "Reshape: shape is (); pass at least one size"),
    (lambda: nn.Reshape(-1, -1), "Reshape: shape is (-1, -1); pass at least one size, and at most one -1"),
    (lambda: nn.Reshape(0), "Reshape: shape is 0; pass an integer of at least 1"),
    (lambda: nn.Permute(2, 1), "Permute: dims is (2, 1); pass every axis once, starting with 0, the batch"),
)
