"""Gradients of convolutions and transposed ones against finite differences."""

import itertools
import json
import re

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers

CONVOLUTIONS = {
    "plain": ((2, 5, 6), (3, 2, 3, 3), ""),
    "by one point": ((2, 4, 3), (3, 2, 1, 1), ""),
    "by one point, in strides": ((2, 5, 4), (3, 2, 1, 1), "strides=[2, 2]"),
    "padded": ((2, 5, 4), (3, 2, 3, 3), "pads=[1, 1, 1, 1]"),
    "padded unevenly": ((2, 5, 4), (3, 2, 3, 3), "pads=[0, 1, 2, 0]"),
    "padded more than the kernel": ((1, 3, 3), (2, 1, 2, 2), "pads=[2, 3, 3, 2]"),
    "strided": ((2, 6, 7), (3, 2, 3, 3), "strides=[2, 2]"),
    "strided, padded, with a rest": ((2, 8, 7), (3, 2, 3, 3), "strides=[2, 3], pads=[1, 1, 1, 1]"),
    "stride above the kernel": ((1, 9, 8), (2, 1, 2, 2), "strides=[3, 4]"),
    "dilated": ((2, 7, 6), (3, 2, 3, 2), "dilations=[2, 3]"),
    "dilated, strided, padded": ((2, 9, 8), (3, 2, 3, 3), "dilations=[2, 2], strides=[2, 3], pads=[2, 1, 2, 2]"),
    "grouped": ((4, 5, 5), (6, 2, 3, 3), "group=2, pads=[1, 1, 1, 1]"),
    "grouped, strided": ((4, 6, 5), (2, 2, 3, 2), "group=2, strides=[2, 2]"),
    "grouped, many channels": ((12, 4, 5), (4, 6, 3, 2), "group=2, pads=[1, 0, 1, 1]"),
    "grouped, by one point": ((6, 3, 3), (3, 2, 1, 1), "group=3"),
    "depthwise": ((3, 5, 5), (3, 1, 3, 3), "group=3, pads=[1, 1, 1, 1]"),
    "depthwise, strided": ((3, 7, 6), (3, 1, 3, 3), "group=3, strides=[2, 2], pads=[1, 1, 1, 1]"),
    "depthwise, dilated": ((3, 7, 6), (3, 1, 3, 3), "group=3, dilations=[2, 1], pads=[2, 1, 2, 1]"),
    "depthwise, two for each": ((2, 5, 4), (4, 1, 3, 3), "group=2"),
    "one channel": ((1, 5, 5), (1, 1, 3, 3), "pads=[1, 1, 1, 1]"),
    "one dimension": ((2, 9), (3, 2, 4), "pads=[2, 1]"),
    "one dimension, strided and dilated": ((2, 12), (3, 2, 3), "strides=[3], dilations=[2], pads=[1, 0]"),
    "one dimension, depthwise": ((3, 9), (3, 1, 3), "group=3, pads=[1, 1], strides=[2]"),
    "three dimensions": ((2, 4, 3, 4), (3, 2, 2, 3, 2), "pads=[0, 1, 0, 1, 1, 0], strides=[2, 1, 2]"),
    "same, upper": ((2, 6, 5), (3, 2, 3, 2), 'auto_pad="SAME_UPPER", strides=[2, 2]'),
    "same, lower": ((2, 6, 5), (3, 2, 4, 2), 'auto_pad="SAME_LOWER", strides=[1, 2]'),
    "same, with strides above the kernel": ((1, 8, 5), (2, 1, 1, 2), 'auto_pad="SAME_UPPER", strides=[3, 3]'),
    "valid": ((2, 6, 5), (3, 2, 3, 2), 'auto_pad="VALID", strides=[2, 1]'),
    "kernel as large as the image": ((2, 3, 4), (3, 2, 3, 4), ""),
    "many channels": ((7, 5, 4), (3, 7, 3, 3), ""),
    "many channels, padded unevenly": ((7, 4, 5), (2, 7, 3, 2), "pads=[1, 0, 2, 1]"),
    "many channels, padded more than the kernel": ((6, 2, 3), (2, 6, 2, 2), "pads=[3, 2, 2, 3]"),
    "many channels, dilated": ((6, 7, 6), (2, 6, 3, 2), "dilations=[2, 3], pads=[1, 2, 0, 1]"),
    "many channels, strided": ((7, 6, 7), (2, 7, 3, 3), "strides=[2, 3], pads=[1, 1, 1, 1]"),
    "many channels, by one column": ((6, 6, 3), (2, 6, 3, 1), ""),
    "many channels, by one row": ((6, 3, 6), (2, 6, 1, 3), "pads=[0, 1, 0, 1]"),
    "many channels, by one point": ((6, 3, 3), (2, 6, 1, 1), ""),
    "many channels, wide": ((6, 3, 15), (3, 6, 2, 2), ""),
    "many channels, wide, padded unevenly": ((7, 4, 14), (2, 7, 3, 2), "pads=[1, 0, 2, 1]"),
    "many channels, wide, padded more than the kernel": ((6, 2, 13), (2, 6, 2, 2), "pads=[3, 2, 2, 3]"),
    "many channels, wide, dilated": ((6, 7, 17), (6, 6, 3, 2), "dilations=[2, 3], pads=[1, 2, 0, 1]"),
    "many channels, wide, by one column": ((6, 4, 14), (2, 6, 3, 1), ""),
    "many channels, one dimension": ((8, 9), (3, 8, 4), "pads=[2, 1], dilations=[2]"),
    "few channels, dilated and padded unevenly": ((2, 7, 6), (3, 2, 3, 2), "dilations=[2, 3], pads=[3, 0, 1, 2]"),
    "grouped, dilated and padded unevenly": (
        (4, 5, 6),
        (6, 2, 2, 3),
        "group=2, dilations=[3, 2], pads=[1, 3, 2, 0]",
    ),
    "a row of the kernel in the padding only": ((2, 1, 4), (3, 2, 3, 3), "pads=[1, 1, 1, 1]"),
    "depthwise, a row of the kernel in the padding only": ((2, 1, 4), (2, 1, 3, 3), "pads=[1, 1, 1, 1], group=2"),
    "depthwise, a column of the kernel in the padding only": (
        (2, 4, 1),
        (2, 1, 3, 5),
        "pads=[1, 2, 1, 2], group=2",
    ),
    "depthwise, padded unevenly": ((3, 4, 6), (3, 1, 3, 2), "group=3, pads=[2, 0, 1, 3], strides=[1, 2]"),
    "depthwise, strides above the kernel": ((2, 9, 8), (2, 1, 2, 2), "group=2, strides=[3, 4]"),
    "depthwise, padded more than the kernel": ((2, 3, 3), (2, 1, 2, 2), "group=2, pads=[3, 2, 2, 3]"),
    "depthwise, dilated beyond the image": (
        (2, 3, 4),
        (2, 1, 3, 3),
        "group=2, dilations=[3, 4], pads=[4, 5, 3, 4]",
    ),
    "depthwise, wide": ((2, 2, 70), (2, 1, 2, 3), "group=2"),
    "depthwise, wide and strided": ((2, 2, 140), (2, 1, 2, 3), "group=2, strides=[1, 2]"),
    "depthwise, one dimension, dilated": ((3, 9), (3, 1, 3), "group=3, pads=[2, 1], dilations=[2]"),
    "depthwise, three dimensions": ((2, 3, 4, 3), (2, 1, 2, 2, 2), "group=2, pads=[0, 1, 1, 0, 0, 1]"),
}


@pytest.mark.parametrize(("x", "w", "attributes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_conv(x, w, attributes, bias):
    parameters = {"w": numbers(w, 5)} | ({"b": numbers(w[:1], 6)} if bias else {})
    check(f"y = Conv<{attributes}>(h, w{', b' if bias else ''})".replace("<>", ""), x, parameters)


@pytest.mark.parametrize("group", [1, 2])
def test_one_kernel_for_two_convolutions(group):
    check(f"a = Conv<pads=[1, 1], group={group}>(h, w)\nb = Tanh(a)\ny = Conv<pads=[1, 1], group={group}>(b, w)",
          (2, 5), {"w": numbers((2, 2 // group, 3), 5)})  # fmt: skip


TRANSPOSED = {
    "plain": ((2, 4, 3), (2, 3, 3, 2), ""),
    "by one point": ((2, 3, 3), (2, 3, 1, 1), ""),
    "strided": ((2, 4, 3), (2, 3, 3, 3), "strides=[2, 3]"),
    "strided and padded": ((2, 4, 3), (2, 3, 3, 3), "strides=[2, 2], pads=[1, 0, 1, 1]"),
    "with output padding": ((2, 4, 3), (2, 3, 3, 3), "strides=[2, 3], pads=[1, 1, 1, 1], output_padding=[1, 2]"),
    "doubling": ((2, 3, 3), (2, 1, 2, 2), "strides=[2, 2]"),
    "dilated": ((2, 4, 3), (2, 3, 3, 2), "dilations=[2, 3], pads=[1, 1, 1, 1]"),
    "grouped": ((4, 3, 3), (4, 3, 3, 3), "group=2, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0]"),
    "depthwise": ((3, 3, 4), (3, 1, 3, 3), "group=3, strides=[2, 1], pads=[1, 1, 1, 1]"),
    "one dimension": ((2, 5), (2, 3, 4), "strides=[2], pads=[1, 1]"),
    "valid": ((2, 5), (2, 3, 4), 'strides=[2], auto_pad="VALID"'),
}


@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_conv_transpose(x, w, attributes, bias):
    group = int(attributes.split("group=")[1][0]) if "group=" in attributes else 1
    parameters = {"w": numbers(w, 5)} | ({"b": numbers((w[1] * group,), 6)} if bias else {})

    def formula(x, parameters):
        return transposed(x * parameters["p"], parameters["w"], parameters.get("b"), group, attributes)

    text = f"y = ConvTranspose<{attributes}>(h, w{', b' if bias else ''})".replace("<>", "")
    check(text, x, parameters, reference=formula)


def transposed(x, w, b, group, attributes):
    """Put a kernel, times the value, down at every place of the input; onnx's own evaluator does no groups."""
    form = options(attributes)
    kernel, count = w.shape[2:], w.ndim - 2
    strides, dilations = form.get("strides", [1] * count), form.get("dilations", [1] * count)
    pads, extra = form.get("pads", [0] * 2 * count), form.get("output_padding", [0] * count)
    whole = [(n - 1) * s + d * (k - 1) + 1 + e
             for n, s, d, k, e in zip(x.shape[2:], strides, dilations, kernel, extra, strict=True)]  # fmt: skip
    y = np.zeros((len(x), group, w.shape[1], *whole))
    parts, kernels = x.reshape(len(x), group, -1, *x.shape[2:]), w.reshape(group, -1, *w.shape[1:])
    for spot in np.ndindex(*kernel):
        ends = [(at * d, at * d + (n - 1) * s + 1, s)
                for at, d, n, s in zip(spot, dilations, x.shape[2:], strides, strict=True)]  # fmt: skip
        y[(..., *itertools.starmap(slice, ends))] += np.einsum("ngc...,gco->ngo...", parts, kernels[(..., *spot)])
    y = y.reshape(len(x), -1, *whole)
    y = y[(..., *[slice(pads[axis], whole[axis] - pads[count + axis]) for axis in range(count)])]
    return y if b is None else y + b.reshape(-1, *[1] * count)


def options(attributes):
    return {name: json.loads(value) for name, value in re.findall(r"(\w+)=(\[[^]]*\])", attributes)}


@pytest.mark.parametrize("attributes", ["output_shape=[9]", 'auto_pad="SAME_UPPER"'])
def test_padding_that_is_not_given_by_numbers_is_refused(attributes):
    text = f"h = Mul(x, p)\ny = ConvTranspose<{attributes}, strides=[2]>(h, w)"
    model = forward(text, {"p": numbers((1, 2, 4)), "w": numbers((2, 3, 3), 5)}, (2, 4))
    with pytest.raises(GraphError, match="its padding is automatic; export it with numbers in `pads`"):
        build_training_graph(model, GraphSettings(loss="mse"))


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((8, 24, 24), (16, 8, 3, 3), "pads=[1, 1, 1, 1]"),
        ((8, 25, 24), (16, 8, 5, 5), "pads=[2, 2, 2, 2], strides=[2, 2]"),
        ((16, 24, 24), (16, 1, 3, 3), "pads=[1, 1, 1, 1], group=16"),
        ((16, 12, 12), (32, 16, 1, 1), ""),
    ],
)
def test_sizes_at_which_threads_share_the_work(x, w, attributes):
    check(f"y = Conv<{attributes}>(h, w, b)".replace("<>", ""), x, {"w": numbers(w, 5), "b": numbers(w[:1], 6)})
