"""Convolutions and pools, against references in numpy."""

import itertools

import numpy as np

from edgeasync import nn
from tests.support.models.layers import along, computes, refuses_arguments, refuses_shapes


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


LAYERS = [
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

test_a_layer_computes_what_it_says = computes(LAYERS)

test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
    (
        [nn.ReLU(), nn.Residual(nn.Conv2d(16, 8, 3))],
        (8, 4, 4),
        "1.body.0 Conv2d got [batch, 8, 4, 4], but needs [batch, 16, height, width]",
    ),
    ([nn.Conv1d(3, 2, 1)], (3, 4, 4), "0 Conv1d got [batch, 3, 4, 4], but needs [batch, 3, length]"),
    (
        [nn.Conv2d(3, 2, 3, dilation=2)],
        (3, 4, 9),
        "0 Conv2d got [batch, 3, 4, 9], but needs height and width of at least 5 x 5",
    ),
    (
        [nn.ConvTranspose2d(3, 2, 2)],
        (2, 4, 4),
        "0 ConvTranspose2d got [batch, 2, 4, 4], but needs [batch, 3, height",
    ),
    (
        [nn.MaxPool2d(5)],
        (3, 4, 4),
        "0 MaxPool2d got [batch, 3, 4, 4], but needs height and width of at least 5 x 5",
    ),
    ([nn.AvgPool2d(2)], (4, 4), "0 AvgPool2d got [batch, 4, 4], but needs [batch, channels, height, width]"),
    ([nn.MaxPool1d(2)], (4,), "0 MaxPool1d got [batch, 4], but needs [batch, channels, length]"),
    ([nn.GlobalAvgPool()], (4,), "0 GlobalAvgPool got [batch, 4], but needs [batch, channels, length] or"),
    ([nn.Upsample(2)], (4,), "0 Upsample got [batch, 4], but needs [batch, channels, length] or"),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (
        lambda: nn.Conv2d(1, 2, (3, 3, 3)),
        "Conv2d: kernel_size is (3, 3, 3); pass an integer of at least 1 or a tuple of 2",
    ),
    (lambda: nn.Conv1d(1, 2, 3, stride=0), "Conv1d: stride is 0"),
    (lambda: nn.Conv2d(1, 2, 3, padding="same"), "Conv2d: padding is 'same'; pass an integer of at least 0"),
    (
        lambda: nn.Conv2d(4, 6, 3, groups=4),
        "Conv2d: groups is 4; pass a divisor of in_channels 4 and out_channels 6",
    ),
    (lambda: nn.MaxPool2d(3, padding=2), "MaxPool2d: padding is 2; pass at most half the kernel_size"),
    (lambda: nn.Upsample(1.5), "Upsample: scale_factor is 1.5; pass an integer of at least 1"),
)
