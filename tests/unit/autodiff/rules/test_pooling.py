"""Gradients of pooling, against finite differences and, where values tie, against loops."""

import itertools
import math

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers, run, session


class Windows:
    """The places of every window of a pool, in numpy."""

    def __init__(self, sizes, kernel, strides=None, pads=None, dilations=None, *, ceil=False):
        count = len(kernel)
        self.sizes, self.kernel = sizes, kernel
        self.strides, self.dilations = strides or [1] * count, dilations or [1] * count
        self.pads = pads or [0] * 2 * count
        self.outs = []
        for axis in range(count):
            whole = sizes[axis] + self.pads[axis] + self.pads[count + axis]
            room = whole - self.dilations[axis] * (kernel[axis] - 1) - 1
            out = (math.ceil if ceil else math.floor)(room / self.strides[axis]) + 1
            if ceil and (out - 1) * self.strides[axis] >= sizes[axis] + self.pads[axis]:
                out -= 1  # no window begins in the padding behind
            self.outs.append(out)

    def __iter__(self):
        """Yield the place of every window, and the places of the image and of the padding in it."""
        for place in itertools.product(*map(range, self.outs)):
            begins = [p * s - b for p, s, b in zip(place, self.strides, self.pads, strict=False)]
            reach = [range(b, b + k * d, d) for b, k, d in zip(begins, self.kernel, self.dilations, strict=True)]
            inside, padded = [], 0
            for spot in itertools.product(*reach):
                if all(0 <= at < size for at, size in zip(spot, self.sizes, strict=True)):
                    inside.append(spot)
                count = len(self.kernel)
                padded += all(
                    -self.pads[axis] <= spot[axis] < self.sizes[axis] + self.pads[count + axis]
                    for axis in range(count)
                )
            yield place, inside, padded


POOLS = {
    "halves": ((6, 4), {"kernel": [2, 2], "strides": [2, 2]}),
    "halves with a rest": ((7, 5), {"kernel": [2, 2], "strides": [2, 2]}),
    "halves, rounded up": ((7, 5), {"kernel": [2, 2], "strides": [2, 2], "ceil": True}),
    "thirds by half": ((6, 9), {"kernel": [2, 3], "strides": [2, 3]}),
    "overlapping": ((7, 6), {"kernel": [3, 3], "strides": [2, 2]}),
    "overlapping and padded": ((8, 7), {"kernel": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "padded unevenly": ((6, 5), {"kernel": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
    "padded, not overlapping": ((5, 6), {"kernel": [2, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}),
    "overlapping, rounded up": ((8, 6), {"kernel": [3, 3], "strides": [2, 2], "ceil": True}),
    "padded, rounded up": ((8, 6), {"kernel": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil": True}),
    "no strides": ((4, 5), {"kernel": [2, 3]}),
    "strides above the kernel": ((9, 8), {"kernel": [2, 2], "strides": [3, 4]}),
    "dilated": ((7, 8), {"kernel": [2, 2], "dilations": [2, 3]}),
    "dilated windows that interlock": ((8, 9), {"kernel": [2, 2], "strides": [2, 3], "dilations": [2, 3]}),
    "dilated, padded, rounded up": (
        (8, 7), {"kernel": [2, 3], "strides": [2, 2], "dilations": [3, 2], "pads": [1, 1, 1, 1], "ceil": True},
    ),
    "one dimension": ((9,), {"kernel": [2], "strides": [2]}),
    "one dimension, overlapping": ((9,), {"kernel": [4], "strides": [2], "pads": [1, 2]}),
    "one dimension, rounded up": ((10,), {"kernel": [3], "strides": [3], "ceil": True}),
    "three dimensions": ((4, 3, 4), {"kernel": [2, 2, 2], "strides": [2, 1, 2]}),
    "the whole": ((4, 3), {"kernel": [4, 3]}),
    "large windows": ((7, 9), {"kernel": [5, 4], "strides": [2, 2], "pads": [1, 2, 1, 0]}),
    "large windows side by side": ((10, 9), {"kernel": [5, 4], "strides": [5, 4]}),
    "unequal strides, rounded up": (
        (7, 9), {"kernel": [3, 2], "strides": [2, 3], "pads": [0, 1, 1, 0], "ceil": True},
    ),
    "three dimensions, overlapping and padded": (
        (3, 4, 3), {"kernel": [2, 2, 2], "strides": [1, 2, 1], "pads": [1] * 6},
    ),
}  # fmt: skip


def attributes_of(form, **more):
    names = {"kernel": "kernel_shape", "ceil": "ceil_mode"}
    given = {names.get(name, name): int(value) if value is True else value for name, value in form.items()}
    return ", ".join(f"{name}={value}" for name, value in (given | more).items())


def gradients(text, parameters, x, target_of, *, threads=2, batch="batch"):
    graph = build_training_graph(forward(text, parameters, x.shape[1:], batch=batch), GraphSettings(loss="mse"))
    target = target_of(session(forward(text, parameters, x.shape[1:])).run(None, {"x": x})[0])
    return run(graph, {"x": x, "target": target}, threads), target


@pytest.mark.parametrize(("sizes", "form"), POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("values", ["distinct", "tied", "all equal", "negative"])
@pytest.mark.parametrize("batch", ["batch", 3])
def test_max_pool(sizes, form, values, batch):
    """Every window's gradient goes to its largest value, the first of equals."""
    shape = (3, 2, *sizes)
    x = numbers(shape, 3)
    if values == "tied":
        x = np.sign(x) * np.minimum(np.round(np.abs(x)), 1)
    if values == "all equal":
        x = np.full(shape, -1.0, np.float32)
    if values == "negative":
        x = -np.abs(x) - 1
    text = f"h = Mul(x, p)\ny = MaxPool<{attributes_of(form)}>(h)"
    weights = (
        numbers((1, *shape[1:]), 9, positive=True)
        if values == "distinct"
        else np.ones((1, *shape[1:]), np.float32)
    )
    for threads in (1, 2, 4) if batch == "batch" else (2,):
        found, target = gradients(
            text, {"p": weights}, x, lambda y: numbers(y.shape, 4), threads=threads, batch=batch
        )
        h = x * weights
        expected = np.zeros(shape)
        windows = Windows(sizes, **form)
        assert list(target.shape[2:]) == windows.outs
        for place, inside, _ in windows:
            seen = np.stack([h[(..., *spot)] for spot in inside])
            for (example, channel), best in np.ndenumerate(seen.argmax(0)):
                spot, at = (example, channel, *inside[best]), (example, channel, *place)
                expected[spot] += 2 * (h[spot] - target[at]) / target.size
        np.testing.assert_allclose(found["p.grad"], (expected * x).sum(0, keepdims=True), rtol=1e-4, atol=1e-6)


def average(form, padded):
    def formula(x, parameters):
        h = x * parameters["p"]
        windows = Windows(h.shape[2:], **form)
        y = np.zeros((*h.shape[:2], *windows.outs))
        for place, inside, count in windows:
            total = sum(h[(..., *spot)] for spot in inside)
            y[(..., *place)] = total / (count if padded else len(inside))
        return y

    return formula


@pytest.mark.parametrize(("sizes", "form"), POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("padded", [0, 1])
def test_average_pool(sizes, form, padded):
    opset = 19 if "dilations" in form else 18
    check(f"y = AveragePool<{attributes_of(form, count_include_pad=padded)}>(h)", (2, *sizes),
          reference=average(form, padded), opset=opset)  # fmt: skip


@pytest.mark.parametrize("kind", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("padded", [0, 1])
def test_average_pool_that_pads_by_itself(kind, padded):
    form = {"kernel": [3, 2], "strides": [2, 2]}
    if kind != "VALID":
        before, after = ([0, 0], [1, 1]) if kind == "SAME_UPPER" else ([1, 1], [0, 0])
        form["pads"] = [*before, *after]
    attributes = f'kernel_shape=[3, 2], strides=[2, 2], auto_pad="{kind}", count_include_pad={padded}'
    check(f"y = AveragePool<{attributes}>(h)", (2, 6, 5), reference=average(form, padded))


@pytest.mark.parametrize("sizes", [(5,), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pools(op, sizes):
    def formula(x, parameters):
        axes = tuple(range(2, x.ndim))
        return (np.max if op == "GlobalMaxPool" else np.mean)(x * parameters["p"], axis=axes, keepdims=True)

    check(f"y = {op}(h)", (3, *sizes), reference=formula)


def test_a_global_max_pool_shares_the_gradient_among_ties():
    p = np.float32([[[1, 3, 3], [2, 2, 2]]])
    found, _ = gradients(
        "h = Mul(x, p)\ny = GlobalMaxPool(h)", {"p": p}, np.ones((1, 2, 3), np.float32), np.zeros_like
    )
    np.testing.assert_allclose(found["p.grad"], [[[0, 1.5, 1.5], [2 / 3] * 3]])


def test_many_overlapping_windows_over_few_threads():
    """Large enough that a race between threads would show."""
    x = np.ones((8, 16, 33, 33), np.float32)
    p = numbers((1, 16, 33, 33), 3)
    text = "h = Mul(x, p)\ny = MaxPool<kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1]>(h)"
    graph = build_training_graph(forward(text, {"p": p}, x.shape[1:]), GraphSettings(loss="mse"))
    target = numbers(x.shape, 4)
    alone, *others = [run(graph, {"x": x, "target": target}, threads)["p.grad"] for threads in (1, 2, 4, 4, 2)]
    for other in others:
        np.testing.assert_allclose(other, alone, rtol=1e-4, atol=1e-7)


def test_column_major_indices_are_refused():
    text = "h = Mul(x, p)\ny, i = MaxPool<kernel_shape=[2], storage_order=1>(h)"
    with pytest.raises(GraphError, match="storage_order is 1; export it in row-major order"):
        build_training_graph(forward(text, {"p": numbers((1, 2, 4))}, (2, 4)), GraphSettings(loss="mse"))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_last_window_in_the_padding_is_refused(op):
    """onnx counts a window that begins in the padding behind, onnxruntime leaves it out: they must agree."""
    form = {"kernel": [2, 2], "strides": [3, 3], "pads": [1, 1, 1, 1], "ceil": True}
    text = f"h = Mul(x, p)\ny = {op}<{attributes_of(form)}>(h)"
    with pytest.raises(GraphError, match="the training graph does not run"):
        build_training_graph(forward(text, {"p": numbers((1, 2, 4, 5))}, (2, 4, 5)), GraphSettings(loss="mse"))


def norm(form, power):
    def formula(x, parameters):
        h = x * parameters["p"]
        if form is None:
            return (np.abs(h) ** power).sum(tuple(range(2, h.ndim)), keepdims=True) ** (1 / power)
        windows = Windows(h.shape[2:], **form)
        y = np.zeros((*h.shape[:2], *windows.outs))
        for place, inside, _ in windows:
            y[(..., *place)] = sum(np.abs(h[(..., *spot)]) ** power for spot in inside) ** (1 / power)
        return y

    return formula


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("name", ["halves", "overlapping and padded", "one dimension, overlapping", "no strides"])
def test_lp_pool(name, power):
    sizes, form = POOLS[name]
    check(f"y = LpPool<{attributes_of(form, p=power)}>(h)", (2, *sizes), reference=norm(form, power))


@pytest.mark.parametrize("power", [1, 2, 3])
def test_global_lp_pool(power):
    check(f"y = GlobalLpPool<p={power}>(h)", (2, 3, 4), reference=norm(None, power))


def test_a_norm_of_zeros_has_no_slope():
    text = "h = Mul(x, p)\ny = LpPool<kernel_shape=[2], strides=[2]>(h)"
    found, _ = gradients(
        text, {"p": np.zeros((1, 1, 4), np.float32)}, np.ones((1, 1, 4), np.float32), np.ones_like
    )
    np.testing.assert_array_equal(found["p.grad"], np.zeros((1, 1, 4)))
