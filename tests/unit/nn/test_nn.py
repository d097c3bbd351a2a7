"""What layers compute, against references in numpy."""

import itertools
import math

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.errors import ConfigError, StorageError
from tests.support.layers import numbers, parameters, randomized, run


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def normalized(x, axes, eps=1e-5):
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + eps)


def along(values, rank):
    """One value for each channel, to broadcast over (batch, channels, ...)."""
    return values.reshape(1, -1, *[1] * (rank - 2))


def windows(x, kernel, stride, padding, *, dilation=(1, 1), fill=0.0):
    """Every place of a window over images: (batch, channels, rows, columns, *kernel)."""
    spread = [(0, 0), (0, 0), *[(pad, pad) for pad in padding]]
    x = np.pad(x, spread, constant_values=fill)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    seen = np.lib.stride_tricks.sliding_window_view(x, reach, (2, 3))
    return seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolved(x, weight, bias, *, stride, padding, dilation, groups):
    seen = windows(x, weight.shape[2:], stride, padding, dilation=dilation)
    parts = zip(np.split(seen, groups, 1), np.split(weight, groups, 0), strict=True)
    return np.concatenate([np.einsum("bcxykl,ockl->boxy", a, w) for a, w in parts], 1) + along(bias, 4)


def spread(x, weight, bias, *, stride, padding, dilation, groups):
    """A transposed convolution: every value paints the kernel into the result."""
    rows, columns = [
        (n - 1) * s + d * (k - 1) + 1
        for n, s, d, k in zip(x.shape[2:], stride, dilation, weight.shape[2:], strict=True)
    ]
    made = []
    for a, w in zip(np.split(x, groups, 1), np.split(weight, groups, 0), strict=True):
        out = np.zeros((len(x), w.shape[1], rows, columns))
        for i, j in itertools.product(range(x.shape[2]), range(x.shape[3])):
            top, left = i * stride[0], j * stride[1]
            for k, m in itertools.product(range(w.shape[2]), range(w.shape[3])):
                out[:, :, top + k * dilation[0], left + m * dilation[1]] += a[:, :, i, j] @ w[:, :, k, m]
        made.append(out)
    whole = np.concatenate(made, 1)
    inside = whole[:, :, padding[0] : rows - padding[0], padding[1] : columns - padding[1]]
    return inside + along(bias, 4)


def lstm(x, w, r, b):
    size = r.shape[1]
    state, cell, states = np.zeros((len(x), size)), np.zeros((len(x), size)), []
    for t in range(x.shape[1]):
        i, o, f, c = np.split(x[:, t] @ w.T + state @ r.T + b[: 4 * size] + b[4 * size :], 4, 1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        state = sigmoid(o) * np.tanh(cell)
        states.append(state)
    return np.stack(states, 1)


def gru(x, w, r, b):
    size = r.shape[1]
    state, states = np.zeros((len(x), size)), []
    for t in range(x.shape[1]):
        zx, rx, hx = np.split(x[:, t] @ w.T + b[: 3 * size], 3, 1)
        zh, rh, hh = np.split(state @ r.T + b[3 * size :], 3, 1)
        z = sigmoid(zx + zh)
        state = (1 - z) * np.tanh(hx + sigmoid(rx + rh) * hh) + z * state
        states.append(state)
    return np.stack(states, 1)


def recurrent(cell, x, p, prefix):
    """The states of one layer at all times, directions side by side, and the last state of each direction."""
    w, r, b = (p[prefix + key] for key in ("weight_ih", "weight_hh", "bias"))
    ahead = cell(x, w[0], r[0], b[0])
    if len(w) == 1:
        return ahead, ahead[:, -1]
    back = cell(x[:, ::-1], w[1], r[1], b[1])
    return np.concatenate([ahead, back[:, ::-1]], 2), np.concatenate([ahead[:, -1], back[:, -1]], 1)


def stacked(cell, x, p):
    states, _ = recurrent(cell, x, p, "0.0.")
    return recurrent(cell, states, p, "0.1.")


def attended(x, p, heads):
    batch, time, width = x.shape
    projected = x @ p["0.in_proj_weight"].T + p["0.in_proj_bias"]
    apart = [part.reshape(batch, time, heads, -1).transpose(0, 2, 1, 3) for part in np.split(projected, 3, 2)]
    query, key, value = apart
    weights = softmax(query @ key.swapaxes(2, 3) / math.sqrt(width // heads))
    merged = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, time, width)
    return merged @ p["0.out_proj.weight"].T + p["0.out_proj.bias"]


def gelu(x, p):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def batch_norm(x, p):
    scale = along(p["0.weight"] / np.sqrt(p["0.running_var"] + 1e-5), x.ndim)
    return (x - along(p["0.running_mean"], x.ndim)) * scale + along(p["0.bias"], x.ndim)


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
MOVING = [
    (nn.Flatten(), (2, 3, 4), lambda x, p: x.reshape(len(x), 24)),
    (nn.Flatten(), (3,), lambda x, p: x),
    (nn.Reshape(4, -1), (2, 3, 4), lambda x, p: x.reshape(len(x), 4, 6)),
    (nn.Reshape(24), (2, 3, 4), lambda x, p: x.reshape(len(x), 24)),
    (nn.Permute(0, 3, 1, 2), (2, 3, 4), lambda x, p: x.transpose(0, 3, 1, 2)),
    (nn.MeanOverTime(), (5, 3), lambda x, p: x.mean(1)),
]
DENSE = [
    (nn.Linear(3, 2), (3,), lambda x, p: x @ p["0.weight"].T + p["0.bias"]),
    (nn.Linear(3, 2), (5, 3), lambda x, p: x @ p["0.weight"].T + p["0.bias"]),
    (nn.Linear(3, 2, bias=False), (4, 5, 3), lambda x, p: x @ p["0.weight"].T),
    (nn.PositionEmbedding(5, 3), (5, 3), lambda x, p: x + p["0.weight"]),
    (nn.SelfAttention(6, 3), (4, 6), lambda x, p: attended(x, p, 3)),
    (nn.SelfAttention(5, 1), (1, 5), lambda x, p: attended(x, p, 1)),
]
CONVOLUTIONS = [
    (
        nn.Conv2d(2, 4, 3, padding=1),
        (2, 5, 6),
        lambda x, p: convolved(
            x, p["0.weight"], p["0.bias"], stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1
        ),
    ),
    (
        nn.Conv2d(4, 6, (2, 3), (2, 1), (0, 2), dilation=(1, 2), groups=2, bias=False),
        (4, 7, 6),
        lambda x, p: convolved(
            x, p["0.weight"], np.zeros(6), stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2
        ),
    ),
    (
        nn.Conv1d(3, 6, 3, stride=2, padding=1, dilation=2, groups=3),
        (3, 9),
        lambda x, p: convolved(
            x[:, :, None],
            p["0.weight"][:, :, None],
            p["0.bias"],
            stride=(1, 2),
            padding=(0, 1),
            dilation=(1, 2),
            groups=3,
        )[:, :, 0],
    ),
    (
        nn.ConvTranspose2d(2, 3, 2, 2),
        (2, 3, 4),
        lambda x, p: spread(
            x, p["0.weight"], p["0.bias"], stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=1
        ),
    ),
    (
        nn.ConvTranspose2d(4, 6, (3, 2), (1, 3), (2, 0), dilation=(2, 1), groups=2, bias=False),
        (4, 3, 4),
        lambda x, p: spread(
            x, p["0.weight"], np.zeros(6), stride=(1, 3), padding=(2, 0), dilation=(2, 1), groups=2
        ),
    ),
]
POOLS = [
    (nn.MaxPool2d(2), (2, 5, 6), lambda x, p: windows(x, (2, 2), (2, 2), (0, 0)).max((4, 5))),
    (
        nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
        (2, 5, 6),
        lambda x, p: windows(x, (3, 2), (2, 1), (1, 0), fill=-np.inf).max((4, 5)),
    ),
    (nn.MaxPool1d(3, 2), (2, 8), lambda x, p: windows(x[:, :, None], (1, 3), (1, 2), (0, 0)).max((2, 4, 5))),
    (nn.AvgPool2d(3, 2, 1), (2, 5, 6), lambda x, p: windows(x, (3, 3), (2, 2), (1, 1)).mean((4, 5))),
    (nn.GlobalAvgPool(), (2, 5), lambda x, p: x.mean(2)),
    (nn.GlobalAvgPool(), (2, 5, 6), lambda x, p: x.mean((2, 3))),
    (nn.Upsample(3), (2, 4), lambda x, p: x.repeat(3, 2)),
    (nn.Upsample(2), (2, 3, 4), lambda x, p: x.repeat(2, 2).repeat(2, 3)),
]
NORMS = [
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
RECURRENT = [
    (nn.LSTM(3, 4), (5, 3), lambda x, p: recurrent(lstm, x, p, "0.")[1]),
    (nn.LSTM(3, 4, bidirectional=True), (5, 3), lambda x, p: recurrent(lstm, x, p, "0.")[1]),
    (nn.LSTM(3, 4, 2, bidirectional=True, return_sequences=True), (5, 3), lambda x, p: stacked(lstm, x, p)[0]),
    (nn.GRU(3, 4, return_sequences=True), (5, 3), lambda x, p: recurrent(gru, x, p, "0.")[0]),
    (nn.GRU(3, 4, 2), (5, 3), lambda x, p: stacked(gru, x, p)[1]),
    (nn.GRU(3, 4, 2, bidirectional=True), (1, 3), lambda x, p: stacked(gru, x, p)[1]),
]
LAYERS = [
    *[(layer, (3, 4), reference) for layer, reference in ELEMENTWISE],
    *[case for cases in (MOVING, DENSE, CONVOLUTIONS, POOLS, NORMS, RECURRENT) for case in cases],
    (
        nn.Residual(nn.Linear(3, 3), nn.ReLU()),
        (3,),
        lambda x, p: x + np.maximum(x @ p["0.body.0.weight"].T + p["0.body.0.bias"], 0),
    ),
    (
        nn.Residual(nn.Linear(3, 2), shortcut=nn.Sequential(nn.Linear(3, 2, bias=False))),
        (3,),
        lambda x, p: x @ (p["0.body.0.weight"] + p["0.shortcut.0.weight"]).T + p["0.body.0.bias"],
    ),
    (
        nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Tanh()),
        (3,),
        lambda x, p: np.tanh(x @ p["0.0.weight"].T + p["0.0.bias"]),
    ),
]


@pytest.mark.parametrize(("layer", "dims", "reference"), LAYERS, ids=lambda case: type(case).__name__)
def test_a_layer_computes_what_it_says(layer, dims, reference):
    proto = randomized(layer, dims)
    onnx.checker.check_model(proto, full_check=True)
    declared = [dim.dim_param or dim.dim_value for dim in proto.graph.output[0].type.tensor_type.shape.dim]
    for rows in (1, 5):
        x = numbers((rows, *dims))
        result = run(proto, x)
        expected = reference(x.astype(np.float64), parameters(proto))
        assert result.dtype == np.float32
        assert result.shape == expected.shape
        assert declared == ["batch", *result.shape[1:]]
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


def test_every_layer_is_tried():
    kinds = {type(layer).__name__ for layer, *_ in LAYERS} | {"Embedding", "Layer", "save", "to_onnx"}
    assert kinds == set(nn.__all__)


def test_an_embedding_takes_class_numbers():
    proto = nn.to_onnx(nn.Sequential(nn.Flatten(), nn.Embedding(7, 3)), (2, 2), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    x = np.array([[[0, 6], [3, 3]]])
    assert np.array_equal(run(proto, x), parameters(proto)["1.weight"][x.reshape(1, 4)])


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


DIGITS = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(8 * 4 * 4, 10),
)


def test_a_model_has_the_promised_form():
    proto = nn.to_onnx(DIGITS, input_shape=(1, 8, 8), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 9
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 20)]
    assert [entry.name for entry in proto.graph.input] == ["x"]
    assert [entry.name for entry in proto.graph.output] == ["scores"]
    assert [node.name for node in proto.graph.node if node.op_type != "Constant"] == [
        "0", "1", "2", "3.body.0", "3.body.1", "3.body.2", "3", "4", "5", "6",
    ]  # fmt: skip
    assert {name: (values.dtype, values.shape) for name, values in parameters(proto).items()} == {
        name: (np.float32, shape)
        for name, shape in {
            "0.weight": (8, 1, 3, 3),
            "0.bias": (8,),
            "3.body.0.weight": (8, 8, 3, 3),
            "3.body.1.weight": (8,),
            "3.body.1.bias": (8,),
            "3.body.1.running_mean": (8,),
            "3.body.1.running_var": (8,),
            "6.weight": (10, 128),
            "6.bias": (10,),
        }.items()
    }


def test_node_names_are_unique_and_begin_with_the_path():
    model = nn.Sequential(nn.LSTM(3, 4, 2, return_sequences=True), nn.SelfAttention(4, 2), nn.Linear(4, 2))
    names = [node.name for node in nn.to_onnx(model, (5, 3)).graph.node]
    assert len(set(names)) == len(names)
    assert {name[0] for name in names} == {"0", "1", "2"}


def test_the_seed_alone_decides_the_parameters():
    first, again, other = (nn.to_onnx(DIGITS, (1, 8, 8), seed=seed).SerializeToString() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("layer", "dims", "name", "bound"),
    [
        (nn.Linear(100, 50), (100,), "0.weight", math.sqrt(6 / 150)),
        (nn.Conv2d(16, 16, 3, groups=2), (16, 3, 3), "0.weight", math.sqrt(6 / 72)),
        (nn.ConvTranspose2d(16, 32, 4, 2), (16, 3, 3), "0.weight", math.sqrt(6 / 64)),
        (nn.GRU(20, 25), (2, 20), "0.weight_hh", 0.2),
        (nn.LSTM(20, 25), (2, 20), "0.bias", 0.2),
        (nn.SelfAttention(32, 4), (2, 32), "0.in_proj_weight", math.sqrt(6 / 64)),
        (nn.Embedding(100, 30), (2,), "0.weight", math.sqrt(3)),
    ],
)
def test_first_values_fill_their_range(layer, dims, name, bound):
    values = parameters(nn.to_onnx(layer, dims, seed=0))[name]
    assert np.abs(values).max() <= bound * (1 + 1e-6)
    assert values.min() < -0.9 * bound
    assert values.max() > 0.9 * bound
    assert abs(values.mean()) < 0.15 * bound


def test_first_values_are_these():
    # Held fast, so that the same seed means the same model in every version and on every machine.
    weight = parameters(nn.to_onnx(nn.Linear(2, 1), (2,), seed=0))["0.weight"]
    draws = np.random.Generator(np.random.PCG64(0)).random(2, np.float32)
    assert weight.tolist() == [((2 * draws - 1) * np.float32(math.sqrt(2))).tolist()]


@pytest.mark.parametrize(
    ("layers", "dims", "sentence"),
    [
        ([nn.Flatten(), nn.Linear(5, 2)], (2, 3), "1 Linear got [batch, 6]; it takes [batch, ..., 5]"),
        (
            [nn.ReLU(), nn.Residual(nn.Conv2d(16, 8, 3))],
            (8, 4, 4),
            "1.body.0 Conv2d got [batch, 8, 4, 4]; it takes [batch, 16, height, width]",
        ),
        (
            [nn.Residual(nn.Tanh(), shortcut=nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))],
            (3,),
            "0.shortcut.1 Linear got [batch, 3]; it takes",
        ),
        (
            [nn.Residual(nn.Linear(3, 2))],
            (3,),
            "0 Residual got [batch, 3]; its body makes [batch, 2] of it, but its input",
        ),
        (
            [nn.Residual(nn.Tanh(), shortcut=nn.Linear(3, 2))],
            (3,),
            "but its shortcut is [batch, 2]: give a shortcut",
        ),
        (
            [nn.Embedding(5, 2), nn.Embedding(5, 2)],
            (3,),
            "1 Embedding got [batch, 3, 2]; it takes int64 values, not float32",
        ),
        ([nn.Reshape(3), nn.Embedding(5, 2), nn.Linear(3, 3)], (3,), "2 Linear got [batch, 3, 2]"),
        ([nn.Conv1d(3, 2, 1)], (3, 4, 4), "0 Conv1d got [batch, 3, 4, 4]; it takes [batch, 3, length]"),
        (
            [nn.Conv2d(3, 2, 3, dilation=2)],
            (3, 4, 9),
            "0 Conv2d got [batch, 3, 4, 9]; it takes height and width of 5 x 5",
        ),
        (
            [nn.ConvTranspose2d(3, 2, 2)],
            (2, 4, 4),
            "0 ConvTranspose2d got [batch, 2, 4, 4]; it takes [batch, 3, height",
        ),
        (
            [nn.ConvTranspose2d(2, 2, 1, 1, 2)],
            (2, 4, 4),
            "it takes a larger image: its padding leaves 0 x 0 of this one",
        ),
        (
            [nn.MaxPool2d(5)],
            (3, 4, 4),
            "0 MaxPool2d got [batch, 3, 4, 4]; it takes height and width of 5 x 5 or more",
        ),
        ([nn.AvgPool2d(2)], (4, 4), "0 AvgPool2d got [batch, 4, 4]; it takes [batch, channels, height, width]"),
        ([nn.MaxPool1d(2)], (4,), "0 MaxPool1d got [batch, 4]; it takes [batch, channels, length]"),
        ([nn.GlobalAvgPool()], (4,), "0 GlobalAvgPool got [batch, 4]; it takes [batch, channels, length] or"),
        ([nn.Upsample(2)], (4,), "0 Upsample got [batch, 4]; it takes [batch, channels, length] or"),
        (
            [nn.BatchNorm1d(3)],
            (3, 4, 4),
            "0 BatchNorm1d got [batch, 3, 4, 4]; it takes [batch, 3] or [batch, 3, length]",
        ),
        ([nn.BatchNorm2d(3)], (4, 4, 3), "0 BatchNorm2d got [batch, 4, 4, 3]; it takes [batch, 3, height, width]"),
        ([nn.LayerNorm((2, 3))], (3,), "0 LayerNorm got [batch, 3]; it takes [batch, ..., 2, 3]"),
        ([nn.InstanceNorm2d(3)], (3,), "0 InstanceNorm2d got [batch, 3]; it takes [batch, 3, height, width]"),
        ([nn.GRU(3, 2)], (5, 4), "0 GRU got [batch, 5, 4]; it takes [batch, time, 3]"),
        ([nn.LSTM(3, 2)], (3,), "0 LSTM got [batch, 3]; it takes [batch, time, 3]"),
        ([nn.SelfAttention(4, 2)], (4,), "0 SelfAttention got [batch, 4]; it takes [batch, time, 4]"),
        ([nn.PositionEmbedding(4, 3)], (5, 3), "0 PositionEmbedding got [batch, 5, 3]; it takes [batch, 4, 3]"),
        ([nn.MeanOverTime()], (5,), "0 MeanOverTime got [batch, 5]; it takes [batch, time, ...]"),
        ([nn.Softmax(2)], (5,), "0 Softmax got [batch, 5]; it takes an input in which dim 2 is an axis other"),
        (
            [nn.LogSoftmax(-2)],
            (5,),
            "0 LogSoftmax got [batch, 5]; it takes an input in which dim -2 is an axis other",
        ),
        ([nn.Reshape(2, 3)], (5,), "0 Reshape got [batch, 5]; it takes 6 values per example, not 5"),
        (
            [nn.Reshape(-1, 2)],
            (5,),
            "0 Reshape got [batch, 5]; it takes a multiple of 2 values per example, not 5",
        ),
        ([nn.Permute(0, 2, 1)], (5,), "0 Permute got [batch, 5]; it takes 3 axes, the batch included"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_layer_s_path(layers, dims, sentence):
    with pytest.raises(ConfigError) as caught:
        nn.to_onnx(nn.Sequential(*layers), dims)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nn.Sequential, "Sequential has no layers; give one at least"),
        (lambda: nn.Sequential(nn.ReLU), "at place 0 is not a layer; write ReLU(...)"),
        (nn.Residual, "Residual has no layers"),
        (lambda: nn.Residual(nn.ReLU(), shortcut=3), "Residual: 3 at place 0 is not a layer"),
        (lambda: nn.Linear(0, 2), "Linear: in_features is 0; give an integer of 1 or more"),
        (lambda: nn.Linear(2, 2.0), "Linear: out_features is 2.0; give an integer of 1 or more"),
        (lambda: nn.Linear(2, True), "Linear: out_features is True; give an integer"),
        (lambda: nn.Linear(2, 2, 1), "Linear: bias is 1; give True or False"),
        (lambda: nn.Embedding(2, 0), "Embedding: width is 0"),
        (lambda: nn.PositionEmbedding(0, 2), "PositionEmbedding: length is 0"),
        (lambda: nn.LeakyReLU(-0.1), "LeakyReLU: negative_slope is -0.1; give a number of 0 or more"),
        (lambda: nn.Dropout(1.0), "Dropout: p is 1.0; give a number of 0 or more and below 1"),
        (lambda: nn.Dropout(math.nan), "Dropout: p is nan"),
        (lambda: nn.Dropout("0.1"), "Dropout: p is '0.1'"),
        (lambda: nn.Softmax(None), "Softmax: dim is None; give an integer"),
        (nn.Reshape, "Reshape: shape is (); give one size at least"),
        (lambda: nn.Reshape(-1, -1), "Reshape: shape is (-1, -1); give one size at least, and at most one -1"),
        (lambda: nn.Reshape(0), "Reshape: shape is 0; give an integer of 1 or more"),
        (lambda: nn.Permute(2, 1), "Permute: dims is (2, 1); give every axis once, beginning with the batch, 0"),
        (lambda: nn.Permute(1, 0), "Permute: dims is (1, 0)"),
        (lambda: nn.Permute(0, 1.0), "Permute: dims is 1.0; give an integer of 0 or more"),
        (
            lambda: nn.Conv2d(1, 2, (3, 3, 3)),
            "Conv2d: kernel_size is (3, 3, 3); give an integer of 1 or more or a tuple of 2",
        ),
        (lambda: nn.Conv1d(1, 2, 3, stride=0), "Conv1d: stride is 0"),
        (lambda: nn.Conv2d(1, 2, 3, padding="same"), "Conv2d: padding is 'same'; give an integer of 0 or more"),
        (
            lambda: nn.Conv2d(4, 6, 3, groups=4),
            "Conv2d: groups is 4; give a divisor of in_channels 4 and out_channels 6",
        ),
        (lambda: nn.ConvTranspose2d(1, 2, 3, dilation=0), "ConvTranspose2d: dilation is 0"),
        (lambda: nn.MaxPool2d(3, padding=2), "MaxPool2d: padding is 2; give half the kernel_size at most"),
        (lambda: nn.MaxPool1d(0), "MaxPool1d: kernel_size is 0"),
        (lambda: nn.AvgPool2d(2, 0), "AvgPool2d: stride is 0"),
        (lambda: nn.Upsample(1.5), "Upsample: scale_factor is 1.5; give an integer of 1 or more"),
        (lambda: nn.BatchNorm1d(3, eps=0.0), "BatchNorm1d: eps is 0.0; give a number above 0 and below 1"),
        (lambda: nn.BatchNorm2d(3, momentum=None), "BatchNorm2d: momentum is None"),
        (lambda: nn.LayerNorm(()), "LayerNorm: normalized_shape is (); give one size at least"),
        (lambda: nn.LayerNorm((3, 0)), "LayerNorm: normalized_shape is (3, 0)"),
        (lambda: nn.InstanceNorm2d(0), "InstanceNorm2d: num_features is 0"),
        (lambda: nn.LSTM(3, 4, 0), "LSTM: num_layers is 0"),
        (lambda: nn.GRU(3, 4, bidirectional=2), "GRU: bidirectional is 2; give True or False"),
        (lambda: nn.SelfAttention(6, 4), "SelfAttention: heads is 4; give a divisor of width 6"),
        (lambda: nn.to_onnx(nn.ReLU, (3,)), "give a layer, as Sequential(...)"),
        (lambda: nn.to_onnx(nn.ReLU(), ()), "input_shape is (); give the sizes of one example"),
        (lambda: nn.to_onnx(nn.ReLU(), (3, 0)), "input_shape is (3, 0); give"),
        (lambda: nn.to_onnx(nn.ReLU(), 3), "input_shape is 3; give"),
        (lambda: nn.to_onnx(nn.ReLU(), (3,), seed=-1), "seed is -1; give an integer of 0 or more"),
    ],
)
def test_a_wrong_argument_is_refused(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)


def test_descriptions_are_values():
    assert nn.Sequential(nn.Linear(3, 2), nn.ReLU()) == nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    assert nn.Conv2d(1, 2, 3) != nn.Conv2d(1, 2, 3, padding=1)
    block = nn.Linear(3, 3)
    twice = parameters(nn.to_onnx(nn.Sequential(block, block), (3,)))
    assert not np.array_equal(twice["0.weight"], twice["1.weight"])
    assert nn.to_onnx(nn.Linear(np.int64(3), 2), (3,)) == nn.to_onnx(nn.Linear(3, 2), (3,))


def test_a_transformer_encoder_can_be_written():
    def block(width):
        return [
            nn.Residual(nn.LayerNorm(width), nn.SelfAttention(width, 4), nn.Dropout(0.1)),
            nn.Residual(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
        ]

    model = nn.Sequential(
        nn.Embedding(11, 16),
        nn.PositionEmbedding(6, 16),
        *block(16),
        *block(16),
        nn.MeanOverTime(),
        nn.Linear(16, 3),
    )
    proto = nn.to_onnx(model, (6,), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    assert "2.body.1.in_proj_weight" in parameters(proto)
    x = np.random.Generator(np.random.PCG64(5)).integers(0, 11, (5, 6))
    scores = run(proto, x)
    assert scores.shape == (5, 3)
    np.testing.assert_allclose(run(proto, x[:1]), scores[:1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(proto, x[:, ::-1].copy()), scores, atol=1e-3)


def test_an_lstm_classifier_can_be_written():
    model = nn.Sequential(nn.LSTM(3, 8, return_sequences=True), nn.Dropout(), nn.GRU(8, 8), nn.Linear(8, 4))
    proto = nn.to_onnx(model, (7, 3), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    x = numbers((5, 7, 3))
    assert run(proto, x).shape == (5, 4)
    np.testing.assert_allclose(run(proto, x[:1]), run(proto, x)[:1], rtol=1e-5, atol=1e-6)


def test_a_model_is_saved(tmp_path):
    nn.save(DIGITS, tmp_path / "digits.onnx", input_shape=(1, 8, 8), seed=2)
    assert onnx.load(tmp_path / "digits.onnx") == nn.to_onnx(DIGITS, (1, 8, 8), seed=2)
    with pytest.raises(StorageError, match=r"digits\.onnx: cannot be written"):
        nn.save(DIGITS, str(tmp_path / "nowhere" / "digits.onnx"), (1, 8, 8))
