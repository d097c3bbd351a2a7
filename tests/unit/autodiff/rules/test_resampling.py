"""Gradients of resizing and of padding by copies, against finite differences of onnx's own evaluator."""

import itertools

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.rules.resampling import MATRIX_MAX
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers, run, session

COPIES = {
    "doubled": ('coordinate_transformation_mode="asymmetric", nearest_mode="floor"', [1, 1, 2, 2]),
    "doubled as by default": ("", [1, 1, 2, 2]),
    "by two and three": ('coordinate_transformation_mode="asymmetric", nearest_mode="floor"', [1, 1, 2, 3]),
    "tripled": ("", [1, 1, 3, 1]),
    "not at all": ("", [1, 1, 1, 1]),
    "corners, not at all": ('coordinate_transformation_mode="align_corners"', [1, 1, 1, 1]),
}


@pytest.mark.parametrize(("attributes", "scales"), COPIES.values(), ids=COPIES)
def test_copies(attributes, scales):
    def formula(x, parameters):
        return (x * parameters["p"]).repeat(scales[2], 2).repeat(scales[3], 3)

    graph = check(f"y = Resize<{attributes}>(h, , s)".replace("<>", ""), (2, 3, 4), {"s": np.float32(scales)},
                  reference=formula)  # fmt: skip
    assert b"MatMul" not in graph.model, "a sum of copies is faster than a product"


def test_resize_to_sizes_of_one_dimension():
    text = 'y = Resize<axes=[2], coordinate_transformation_mode="asymmetric", nearest_mode="floor">(h, , , s)'
    check(text, (2, 5), {"s": np.array([10])}, reference=lambda x, parameters: (x * parameters["p"]).repeat(2, 2))


CORNERS = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
KINDS = {
    "linear": 'mode="linear"',
    "linear, antialiased": 'mode="linear", antialias=1',
    "cubic": 'mode="cubic"',
    "cubic, of PIL": 'mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1',
    "cubic, antialiased": 'mode="cubic", cubic_coeff_a=-0.5, antialias=1',
    **{f"nearest, {kind}": f'mode="nearest", nearest_mode="{kind}"'
       for kind in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")},
}  # fmt: skip


def adjoint(text, x, parameters, opset=19):
    """Compare a gradient with the map itself, as onnxruntime computes it: <R h, t> equals <h, R' t>.

    The loss is half the mean square of R h - t. So the gradient of `p` sums x R'(R h - t) over the batch.
    """
    values = {"p": numbers((1, *x), 1)} | parameters
    model = forward(f"h = Mul(x, p)\n{text}", values, x, opset=opset)
    graph = build_training_graph(model, GraphSettings(loss="mse"))
    rows = np.prod(x)
    own = session(forward(text.replace("(h", "(x"), parameters, x, opset=opset))
    (images,) = own.run(None, {"x": np.eye(rows, dtype=np.float32).reshape(rows, *x)})
    matrix = images.reshape(rows, -1).astype(np.float64)
    given = numbers((4, *x), 2)
    y = (given * values["p"]).reshape(4, -1).astype(np.float64) @ matrix
    target = numbers((4, *images.shape[1:]), 3)
    expected = ((2 * (y - target.reshape(4, -1)) / y.size) @ matrix.T).reshape(4, *x) * given
    for threads in (1, 2):
        found = run(graph, {"x": given, "target": target}, threads)["p.grad"][0]
        np.testing.assert_allclose(found, expected.sum(0), rtol=1e-4, atol=2e-6 * np.abs(expected).max() * 4)


FACTORS = {
    "doubled": [1, 1, 2, 2],
    "by other factors": [1, 1, 2.4, 1.5],
    "halved": [1, 1, 0.5, 0.5],
    "by one axis": [1, 1, 1, 0.7],
    "as large, but moved": [1, 1, 1.2, 1],
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("corners", CORNERS)
@pytest.mark.parametrize("scales", FACTORS.values(), ids=FACTORS)
def test_any_factor(kind, corners, scales):
    text = f'y = Resize<{kind}, coordinate_transformation_mode="{corners}">(h, , s)'
    adjoint(text, (2, 4, 6), {"s": np.float32(scales)})


@pytest.mark.parametrize("kind", ["linear", "linear, antialiased", "cubic", "nearest, floor"])
@pytest.mark.parametrize("sizes", [(7, 3), (4, 9), (1, 6), (2, 1)], ids=str)
@pytest.mark.parametrize("corners", CORNERS[:4])
def test_any_size(kind, sizes, corners):
    text = f'y = Resize<{KINDS[kind]}, axes=[2, 3], coordinate_transformation_mode="{corners}">(h, , , s)'
    adjoint(text, (2, 4, 6), {"s": np.array(sizes)})


@pytest.mark.parametrize("x", [(2, 5), (2, 3, 4, 3)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "nearest, ceil"])
def test_one_and_three_dimensions(x, kind):
    scales = [1, 1, *[1.5, 0.5, 2][: len(x) - 1]]
    text = f'y = Resize<{KINDS[kind]}, coordinate_transformation_mode="half_pixel">(h, , s)'
    adjoint(text, x, {"s": np.float32(scales)})


def test_channels_behind_places():
    adjoint('y = Resize<mode="linear">(h, , s)', (4, 3, 2), {"s": np.float32([1, 1.5, 2, 1])})


def test_sizes_that_the_graph_computes():
    """As torch writes them for a free batch: the batch's own size, beside constants."""
    text = 'n = Shape<end=2>(h)\ns = Concat<axis=0>(n, wide)\ny = Resize<mode="linear">(h, , , s)'
    check(text, (2, 3, 4), {"wide": np.array([5, 6])}, reference=halves)


def halves(x, parameters):
    """Interpolate to 5 by 6 with half pixels."""
    h = x * parameters["p"]
    for axis, out in ((2, 5), (3, 6)):
        size = h.shape[axis]
        at = np.clip((np.arange(out) + 0.5) * size / out - 0.5, 0, size - 1)
        low = np.floor(at).astype(int)
        high, share = np.minimum(low + 1, size - 1), (at - low).reshape([-1 if a == axis else 1 for a in range(4)])
        h = h.take(low, axis) * (1 - share) + h.take(high, axis) * share
    return h


@pytest.mark.parametrize(
    ("attributes", "scales", "why"),
    [
        (
            'coordinate_transformation_mode="asymmetric", nearest_mode="floor"',
            [1.2, 1, 1],
            "it resizes the batch axis",
        ),
        ('axes=[2], keep_aspect_ratio_policy="not_larger"', None, "keep_aspect_ratio_policy is not_larger"),
        ("", [1, 1, 2000.0], "needs too large a matrix"),
    ],
)
def test_other_resizes_are_refused(attributes, scales, why):
    text = f"h = Mul(x, p)\ny = Resize<{attributes}>(h, , {'s' if scales else ', s'})".replace("<>", "")
    size = 4 if scales is None or scales[-1] < 2000 else int(MATRIX_MAX**0.5)
    given = np.array([7]) if scales is None else np.float32(scales)
    model = forward(text, {"p": numbers((1, 2, size)), "s": given}, (2, size))
    with pytest.raises(GraphError, match=why):
        build_training_graph(model, GraphSettings(loss="mse"))


def test_a_resize_that_crops_is_refused():
    text = 'h = Mul(x, p)\ny = Resize<coordinate_transformation_mode="tf_crop_and_resize">(h, roi, s)'
    roi = np.float32([0, 0, 0.25, 1, 1, 0.75])
    model = forward(text, {"p": numbers((1, 2, 4)), "roi": roi, "s": np.float32([1, 1, 1])}, (2, 4))
    with pytest.raises(GraphError, match="crop with Slice before resizing"):
        build_training_graph(model, GraphSettings(loss="mse"))


PADS = [(0, 1, 0, 0, 2, 1), (0, 0, 0, 0, 0, 3), (0, 2, 3, 0, 2, 3), (0, 0, 1, 0, 0, 0)]


@pytest.mark.parametrize(("mode", "pads"), [*itertools.product(["reflect", "edge", "wrap"], PADS)], ids=str)
def test_pads_by_copies(mode, pads):
    check(f'a = Pad<mode="{mode}">(h, pads)\ny = Mul(a, a)', (3, 4), {"pads": np.array(pads)}, opset=19)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pads_of_images(mode):
    check(f'a = Pad<mode="{mode}">(h, pads, , axes)\ny = Mul(a, a)', (2, 3, 3, 3),
          {"pads": np.array([1, 2, 2, 1]), "axes": np.array([-1, 2])}, opset=19)  # fmt: skip


def test_pads_of_the_batch_by_copies_are_refused():
    model = forward('h = Mul(x, p)\ny = Pad<mode="edge">(h, pads)',
                    {"p": numbers((1, 3)), "pads": np.array([1, 0, 0, 0])}, (3,))  # fmt: skip
    with pytest.raises(GraphError, match="it pads the batch axis"):
        build_training_graph(model, GraphSettings(loss="mse"))
