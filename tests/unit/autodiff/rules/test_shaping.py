"""Gradients of operators that move values, against finite differences."""

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.rules.shaping import ONE_HOT_MAX
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers, run

INT_MAX, INT_MIN = 2**63 - 1, -(2**63)


def ints(*values):
    return np.array(values, np.int64)


RESHAPES = {
    "joined": "y = Reshape(h, s)",
    "flat": "y = Flatten(h)",
    "flat from the front": "a = Flatten<axis=0>(h)\ny = Mul(a, two)",
    "flat from the back": "y = Flatten<axis=-1>(h)",
    "squeezed": "a = Unsqueeze(h, one)\ny = Squeeze(a, one)",
    "squeezed from the back": "a = Unsqueeze(h, last)\nb = Mul(a, two)\ny = Squeeze(b, last)",
    "squeezed where it can": "a = Unsqueeze(h, one)\nb = Mul(a, two)\ny = Squeeze(b)",
    "by the batch's own size": "n = Shape<start=0, end=1>(h)\nz = Concat<axis=0>(n, rest)\ny = Reshape(h, z)",
    "with the batch inside": "a = Reshape(h, inside)\nb = MatMul(a, w)\ny = Reshape(b, s)",
    "rolled into one": "y = Reshape(h, minus)",
}


@pytest.mark.parametrize("text", RESHAPES.values(), ids=RESHAPES)
def test_reshapes(text):
    constants = {"s": ints(-1, 6), "one": ints(1), "last": ints(-1), "rest": ints(6), "inside": ints(-1, 3),
                 "minus": ints(-1), "two": np.float32(2), "w": numbers((3, 3), 4)}  # fmt: skip
    model = {name: value for name, value in constants.items() if name in text.replace("(", " ").replace(")", " ")
             .replace(",", " ").split()}  # fmt: skip
    if text == RESHAPES["squeezed where it can"]:
        with pytest.MonkeyPatch.context() as patch:  # a batch of 1 would lose its dimension in the model itself
            patch.setattr("tests.support.models.gradients.ALONE", ())
            check(text, (2, 3), model)
    else:
        check(text, (2, 3), model)


@pytest.mark.parametrize("perm", [None, (0, 2, 1), (1, 2, 0), (2, 0, 1), (1, 0, 2)], ids=str)
def test_transpose(perm):
    attribute = "" if perm is None else f"<perm={list(perm)}>"
    check(f"a = Transpose{attribute}(h)\ny = Add(a, a)", (2, 3))


def test_expand():
    check("a = Expand(w, s)\ny = Mul(h, a)", (2, 3), {"w": numbers((2, 1), 3), "s": ints(2, 3)})
    check("a = Expand(w, s)\ny = Add(h, a)", (2, 3), {"w": numbers((3,), 3), "s": ints(1, 2, 3)})
    check("a = Expand(h, s)\ny = Mul(a, w)", (1, 3), {"w": numbers((4, 3), 3), "s": ints(1, 4, 3)})
    check("s = Shape(h)\na = Expand(w, s)\ny = Mul(h, a)", (2, 3), {"w": numbers((1, 2, 1), 3)})


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_concat(axis):
    w = {"w": numbers((1, 3), 4)}
    check(f"a = Mul(h, w)\nb = Concat<axis={axis}>(h, a, h)\ny = Mul(b, b)", (2, 3), w)
    check(f"y = Concat<axis={axis}>(h)", (2, 3))


def test_concat_of_unequal_parts_and_of_parameters():
    check("a = Concat<axis=1>(v, w, v)\ny = MatMul(h, a)", (3,),
          {"v": numbers((3, 2), 4), "w": numbers((3, 1), 5)})  # fmt: skip


SPLITS = {
    "equal parts": "a, b = Split<axis=1, num_outputs=2>(h)\ny = Mul(a, b)",
    "unequal parts": "a, b = Split<axis=-1>(h, s)\nc = MatMul(b, w)\ny = Mul(a, c)",
    "a part unused": "a, b = Split<axis=-1>(h, s)\ny = Mul(a, a)",
    "another part unused": "a, b = Split<axis=-1>(h, s)\ny = Mul(b, b)",
    "a part twice": "a, b = Split<axis=1, num_outputs=2>(h)\nc = Add(a, a)\ny = Mul(c, b)",
    "one part": "a = Split<axis=1, num_outputs=1>(h)\ny = Mul(a, a)",
}


@pytest.mark.parametrize("text", SPLITS.values(), ids=SPLITS)
def test_split(text):
    parameters = {"s": ints(1, 3)} if "h, s" in text else {}
    check(text, (2, 4), parameters | ({"w": numbers((3, 1), 4)} if "MatMul" in text else {}))


def test_split_of_a_parameter_and_of_an_old_opset():
    check("a, b, c = Split<axis=0>(w, s)\nd = Mul(a, b)\ny = MatMul(h, d)", (4,),
          {"w": numbers((9, 2), 4), "s": ints(4, 4, 1)})  # fmt: skip
    text = "a, b = Split<axis=1, split=[1, 3]>(h)\nc = MatMul(b, w)\ny = Mul(a, c)"
    check(text, (4,), {"w": numbers((3, 1), 4)}, opset=11)


SLICES = {
    "a range": ((1,), (4,), (1,), (1,)),
    "to the end": ((2,), (INT_MAX,), (1,), (1,)),
    "from the end": ((-3,), (-1,), (2,), (1,)),
    "beyond the ends": ((-100,), (100,), (1,), (1,)),
    "every second": ((0,), (INT_MAX,), (1,), (2,)),
    "every third from the second": ((1,), (INT_MAX,), (2,), (3,)),
    "backwards": ((-1,), (INT_MIN,), (1,), (-1,)),
    "backwards by two": ((-1,), (INT_MIN,), (1,), (-2,)),
    "backwards by two, cut": ((5,), (0,), (1,), (-2,)),
    "backwards from within": ((-2,), (-6,), (2,), (-3,)),
    "two axes": ((1, -1), (5, INT_MIN), (1, 2), (2, -2)),
    "two axes, out of order": ((-1, 1), (INT_MIN, 5), (-1, 1), (-3, 3)),
    "all of the batch": ((0, 1), (INT_MAX, 5), (0, 1), (1, 1)),
    "one place": ((3,), (4,), (1,), (1,)),
    "backwards to the front exclusively": ((4,), (-6,), (1,), (-1,)),
}


@pytest.mark.parametrize(("starts", "ends", "axes", "steps"), SLICES.values(), ids=SLICES)
def test_slice(starts, ends, axes, steps):
    check("a = Slice(h, starts, ends, axes, steps)\ny = Mul(a, a)", (6, 7),
          {"starts": ints(*starts), "ends": ints(*ends), "axes": ints(*axes), "steps": ints(*steps)})  # fmt: skip


def test_a_slice_that_selects_nothing():
    constants = {"start": ints(0), "split": ints(0), "end": ints(INT_MAX), "axes": ints(1)}
    check("a = Slice(h, split, end, axes)\nb = Slice(h, start, split, axes)\nc = Concat<axis=1>(a, b)\n"
          "y = Mul(c, h)", (6, 7), constants)  # fmt: skip


@pytest.mark.parametrize("end", [1_000_001, 10**9, 2**31 - 1, 2**63 - 1])
def test_a_slice_of_the_whole_batch(end):
    check("a = Slice(h, starts, ends)\ny = Mul(a, a)", (6,),
          {"starts": np.array([0, 1]), "ends": np.array([end, end])})  # fmt: skip


@pytest.mark.parametrize(
    "ends",
    [
        "e = Shape(h)",
        "s = Shape<end=1>(h)\ne = Concat<axis=0>(s, six)",
        "s = Shape(h)\nt = Add(s, s)\ne = Max(t, s)",
    ],
)
def test_a_slice_to_the_end_that_the_graph_computes(ends):
    constants = {"starts": np.array([0, 0]), "six": np.array([6])}
    used = {name: value for name, value in constants.items() if name == "starts" or name in ends}
    check(f"{ends}\na = Slice(h, starts, e)\ny = Mul(a, a)", (6,), used)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [("e = Shape(h)\nb = Sub(e, e)", "e"), ("b = Constant<value_ints=[1, 0]>()\ne = Shape(h)", "e")],
)
def test_a_slice_that_cuts_the_batch_is_refused_wherever_it_ends(starts, ends):
    with pytest.raises(GraphError, match=r"has no gradient: (it slices the batch axis|its input .* constant)"):
        build_training_graph(
            forward(f"h = Mul(x, p)\n{starts}\ny = Slice(h, b, {ends})", {"p": numbers((1, 6))}, (6,)),
            GraphSettings(loss="mse"),
        )


@pytest.mark.parametrize(("axis", "shape"), [(1, (4, 2, 3)), (-1, (4, 5, 2)), (1, (4, 4, 2))])
def test_values_that_are_picked_one_by_one(axis, shape):
    places = np.random.Generator(np.random.PCG64(1)).integers(-3, 3, shape)
    text = f"h = Mul(x, p)\na = GatherElements<axis={axis}>(h, places)\ny = Mul(a, a)"
    parameters = {"p": numbers((1, 5, 3), 1), "places": places}
    graph = build_training_graph(forward(text, parameters, (5, 3), batch=4), GraphSettings(loss="mse"))
    x = numbers((4, 5, 3), 2)
    found = run(graph, {"x": x, "target": np.zeros(shape, np.float32)})
    expected = np.zeros((4, 5, 3))
    for place in np.ndindex(*shape):
        read = list(place)
        read[axis] = places[place]
        expected[tuple(read)] += 4 * (x * parameters["p"])[tuple(read)] ** 3 / places.size
    np.testing.assert_allclose(found["p.grad"][0], (expected * x).sum(0), rtol=1e-4)


def test_the_last_step_of_a_padded_sequence():
    """As torch's `gather` writes it: the place of the last step that is not 0, for each example."""
    check("n = Abs(x)\ns = ReduceSum<keepdims=0>(n, last)\ng = Greater(s, zero)\ni = Cast<to=7>(g)\n"
          "c = ReduceSum(i, one)\nl = Sub(c, unit)\nu = Unsqueeze(l, last)\nk = Expand(u, wide)\n"
          "y = GatherElements<axis=1>(h, k)", (5, 3), {"last": np.array([2]), "zero": np.float32(0),
          "one": np.array([1]), "unit": np.array([1]), "wide": np.array([1, 1, 3])})  # fmt: skip


def test_picking_along_the_batch_one_by_one_is_refused():
    text = (
        "h = Mul(x, p)\ns = Shape(h)\nk = ConstantOfShape<value=int64[1] {0}>(s)\ny = GatherElements<axis=0>(h, k)"
    )
    with pytest.raises(GraphError, match="it selects from the batch axis"):
        build_training_graph(forward(text, {"p": numbers((1, 3))}, (3,)), GraphSettings(loss="mse"))


def test_slice_without_axes_or_steps_and_of_a_parameter():
    check("a = Slice(w, starts, ends)\ny = MatMul(h, a)", (3,),
          {"w": numbers((5, 4), 4), "starts": ints(1), "ends": ints(4)})  # fmt: skip
    check("a = Slice(w, starts, ends, axes)\ny = MatMul(h, a)", (3,),
          {"w": numbers((3, 9), 4), "starts": ints(1), "ends": ints(4), "axes": ints(-1)})  # fmt: skip
    check("t = Transpose<perm=[1, 0, 2]>(h)\na = Slice(t, starts, ends, axes, steps)\ny = Mul(a, a)", (5, 2),
          {"starts": ints(4), "ends": ints(INT_MIN), "axes": ints(0), "steps": ints(-2)})  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "ends", "steps"), [((0,), (-1,), (1,)), ((1,), (INT_MAX,), (1,)), ((-1,), (INT_MIN,), (-1,)),
                                  ((0,), (2,), (1,)), ((0,), (INT_MAX,), (2,))],
)  # fmt: skip
def test_a_cut_of_a_free_batch_is_refused(starts, ends, steps):
    constants = {"p": numbers((1, 3)), "starts": ints(*starts), "ends": ints(*ends), "axes": ints(0),
                 "steps": ints(*steps)}  # fmt: skip
    text = "h = Mul(x, p)\ny = Slice(h, starts, ends, axes, steps)"
    with pytest.raises(GraphError, match=r"Slice that computes 'y' has no gradient: it slices the batch axis"):
        build_training_graph(forward(text, constants, (3,)), GraphSettings(loss="mse"))


def test_a_cut_of_a_fixed_batch():
    constants = {"p": numbers((1, 3)), "starts": ints(1), "ends": ints(3), "axes": ints(0)}
    graph = build_training_graph(
        forward("h = Mul(x, p)\ny = Slice(h, starts, ends, axes)", constants, (3,), batch=4),
        GraphSettings(loss="mse"),
    )
    x, target = numbers((4, 3), 2), numbers((2, 3), 3)
    found = run(graph, {"x": x, "target": target})["p.grad"]
    cut = x[1:3]
    np.testing.assert_allclose(found[0], (2 * (cut * constants["p"] - target) * cut).sum(0) / 6, rtol=1e-5)


PADS = {
    "both ends": ((0, 1, 0, 0, 2, 1), None),
    "one end": ((0, 0, 0, 0, 0, 3), None),
    "nothing": ((0, 0, 0, 0, 0, 0), None),
    "chosen axes": ((1, 2, 0, 1), (2, 1)),
    "an axis from the end": ((1, 0), (-1,)),
}


@pytest.mark.parametrize(("pads", "axes"), PADS.values(), ids=PADS)
@pytest.mark.parametrize("value", [None, 1.5])
def test_pad(pads, axes, value):
    parameters = {"pads": ints(*pads)}
    inputs = "h, pads"
    if value is not None:
        parameters["v"], inputs = np.float32(value), "h, pads, v"
    if axes is not None:
        if value is None:
            return
        parameters["axes"], inputs = ints(*axes), f"{inputs}, axes"
    check(f"y = Pad({inputs})", (3, 4), parameters)


def test_negative_pads_are_refused():
    model = forward("h = Mul(x, p)\ny = Pad(h, pads)", {"p": numbers((1, 3)), "pads": ints(0, -1, 0, 0)}, (3,))
    with pytest.raises(GraphError, match="its padding is negative; use Slice"):
        build_training_graph(model, GraphSettings(loss="mse"))


GATHERS = {
    "rows": (0, (0, 2, 1)),
    "repeated rows": (0, (1, 1, 3, 1)),
    "negative rows": (0, (-1, 3, -4)),
    "a matrix of indices": (0, ((1, 1), (-1, 0))),
    "one row": (0, 2),
    "one row from the end": (0, -1),
    "columns": (1, (2, 0, 2)),
    "a matrix of columns": (1, ((0, 2), (2, -3))),
    "one column": (-1, -2),
    "a column in a vector": (1, (1,)),
}


@pytest.mark.parametrize(("axis", "indices"), GATHERS.values(), ids=GATHERS)
def test_gather_from_a_parameter(axis, indices):
    """Of products with each value's own weight, so that no place can be taken for another."""
    table, places = numbers((4, 3), 4), np.array(indices)
    weights = numbers(np.take(table, places, axis).shape, 6)
    text = (
        f"a = Gather<axis={axis}>(w, i)\nb = Mul(a, v)\nc = Tanh(b)\nd = ReduceSum<keepdims=0>(c)\ny = Mul(h, d)"
    )
    check(text, (3,), {"w": table, "i": places, "v": weights})


@pytest.mark.parametrize("indices", [(0, 2, 1), (1, 1, 1), ((1, -1), (0, 1)), 2, -1, (2,)], ids=str)
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_gather_from_a_batch(axis, indices):
    check(f"a = Gather<axis={axis}>(h, i)\ny = Mul(a, a)", (3, 4), {"i": np.array(indices)})


def test_gather_along_a_free_batch_is_refused():
    model = forward("h = Mul(x, p)\ny = Gather(h, i)", {"p": numbers((1, 3)), "i": ints(0)}, (3,))
    with pytest.raises(GraphError, match="it selects from the batch axis"):
        build_training_graph(model, GraphSettings(loss="mse"))


@pytest.mark.parametrize("rows", [3, ONE_HOT_MAX, ONE_HOT_MAX + 1, 5000])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("shape", [(7,), ()], ids=["sequences", "one each"])
def test_an_embedding_adds_up_what_repeats(rows, threads, dtype, shape):
    """Large enough that threads would race; the indices crowd on few rows and some count from the end."""
    generator = np.random.Generator(np.random.PCG64(3))
    x = generator.integers(-rows, rows, (512, *shape)) % generator.integers(1, rows + 1, (512, *shape))
    x[::5] = -1
    table, target = numbers((rows, 16), 4), numbers((512, *shape, 16), 5)
    model = forward("y = Gather(w, x)", {"w": table}, shape, kind=7 if dtype is np.int64 else 6)
    found = run(build_training_graph(model, GraphSettings(loss="mse")), {"x": x, "target": target}, threads)
    expected = np.zeros((rows, 16))
    np.add.at(expected, x, 2 * (table[x].astype(np.float64) - target) / target.size)
    np.testing.assert_allclose(found["w.grad"], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 3), (4, 1, 1)], ids=str)
def test_tiles(counts):
    check("a = Tile(h, n)\ny = Tanh(a)", (2, 3), {"n": ints(*counts)})


def test_a_parameter_that_is_repeated_for_each_example():
    text = "s = Shape<start=0, end=1>(x)\nn = Concat<axis=0>(s, one)\na = Tile(w, n)\ny = Mul(h, a)"
    check(text, (3,), {"w": numbers((1, 3), 4), "one": ints(1)})
    model = forward(text.replace("h", "x"), {"w": numbers((2, 3), 4), "one": ints(1)}, (3,))
    with pytest.raises(GraphError):  # repeated by the batch's size it is two batches
        build_training_graph(model, GraphSettings(loss="mse"))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_channels_that_become_places(mode):
    check(
        f'a = DepthToSpace<blocksize=2, mode="{mode}">(h)\ny = Mul(a, w)', (8, 3, 2), {"w": numbers((2, 6, 4), 5)}
    )


@pytest.mark.parametrize(("axes", "lengths"), [((0, 1), (2, 3, 1, 0)), ((1, 0), (2, 4, 3))])
def test_sequences_that_are_reversed(axes, lengths):
    """Only the first values of a sequence are reversed, as many as its length."""
    text = (
        f"t = Transpose<perm=[1, 2, 0]>(h)\na = ReverseSequence<time_axis={axes[0]}, batch_axis={axes[1]}>(t, n)\n"
        "b = Mul(a, w)\ny = Transpose<perm=[2, 0, 1]>(b)"
    )
    check(text, (3, 4), {"n": ints(*lengths), "w": numbers((3, 4, 1), 5)})


def test_places_that_become_channels():
    check("a = SpaceToDepth<blocksize=2>(h)\ny = Mul(a, w)", (2, 4, 6), {"w": numbers((8, 2, 3), 5)})


@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        ([[[0, 0], [0, 2]], [[1, 1], [0, 2]]], (2, 2)),
        ([[0, -1], [-1, 0], [0, -1]], (3,)),
        ([[1], [0], [1]], (3, 3)),
    ],
)
def test_values_of_a_table_by_several_indices(indices, shape):
    text = "g = GatherND(w, i)\na = Mul(g, v)\nt = Tanh(a)\nd = ReduceSum<keepdims=0>(t)\ny = Mul(h, d)"
    check(text, (3,), {"w": numbers((2, 3), 4), "i": np.array(indices), "v": numbers(shape, 6)})


def test_a_step_of_each_example():
    """As torch writes h[torch.arange(len(h)), last]."""
    text = """s = Shape<start=0, end=1>(x)
        n = Squeeze(s)
        r = Range(zero, n, one)
        k = Reshape(r, column)
        l = Expand(last, s)
        m = Reshape(l, column)
        i = Concat<axis=1>(k, m)
        g = GatherND(h, i)
        y = Mul(g, g)"""
    constants = {"zero": np.int64(0), "one": np.int64(1), "column": ints(-1, 1)}
    for last in (1, -1):
        check(text, (3, 4), constants | {"last": ints(last)})


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_the_largest_values(axis):
    check(f"a, i = TopK<axis={axis}>(h, k)\ny = Mul(a, a)", (4, 3), {"k": ints(2)})


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_values_that_are_written(reduction):
    written = f'ScatterElements<axis=1, reduction="{reduction}">(w, i, v)'
    check(f"a = {written}\nt = Tanh(a)\nd = ReduceSum<keepdims=0>(t)\ny = Mul(h, d)", (3,),
          {"w": numbers((2, 3), 4), "i": np.array([[0, 2], [2, 1]]), "v": numbers((2, 2), 6)})  # fmt: skip
    written = f'ScatterND<reduction="{reduction}">(w, i, v)'
    check(f"a = {written}\nt = Tanh(a)\nd = ReduceSum<keepdims=0>(t)\ny = Mul(h, d)", (3,),
          {"w": numbers((2, 3), 4), "i": np.array([[0, 2], [1, 0]]), "v": numbers((2,), 6)})  # fmt: skip


@pytest.mark.parametrize(
    ("text", "constants", "why"),
    [
        ("y, i = TopK<axis=0>(h, k)", {"k": ints(1)}, "it selects from the batch axis"),
        ('y = ScatterElements<axis=1, reduction="mul">(h, i, h)', {"i": np.zeros((2, 3), np.int64)}, "reduction"),
    ],
)
def test_what_has_no_gradient_here_is_refused(text, constants, why):
    model = forward(
        f"h = Mul(x, p)\n{text}",
        {"p": numbers((1, 3)), **constants},
        (3,),
        batch=2 if "i" in constants else "batch",
    )
    with pytest.raises(GraphError, match=why):
        build_training_graph(model, GraphSettings(loss="mse"))


@pytest.mark.parametrize("attributes", ["", "upper=0", "upper=1"])
@pytest.mark.parametrize("k", [None, -1, 0, 2])
def test_triangles(attributes, k):
    inputs, constants = ("h", {}) if k is None else ("h, k", {"k": np.array(k, np.int64)})
    check(f"a = Trilu<{attributes}>({inputs})\ny = Mul(a, a)".replace("<>", ""), (3, 4), constants)


@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_cumulative_sums(axis, reverse, exclusive):
    text = f"a = CumSum<reverse={reverse}, exclusive={exclusive}>(h, axis)\ny = Mul(a, w)"
    check(text, (3, 4), {"axis": np.array(axis), "w": numbers((3, 4), 5)})


@pytest.mark.parametrize(
    ("shape", "batch_dims"), [((4, 2), 1), ((4, 3, 1), 1), ((4, 2, 2), 2), ((4, 2, 3, 1), 2)], ids=str
)
def test_values_by_several_indices_of_each_example(shape, batch_dims):
    """Repeated and negative indices, into a batch of a fixed size and into one that is free."""
    generator = np.random.Generator(np.random.PCG64(1))
    sizes = np.array([2, 3, 5][batch_dims - 1 :][: shape[-1]])
    places = generator.integers(-sizes, sizes, shape)
    graph = build_training_graph(
        forward(f"h = Mul(x, p)\na = GatherND<batch_dims={batch_dims}>(h, places)\ny = Mul(a, a)",
                {"p": numbers((1, 2, 3, 5), 1), "places": places}, (2, 3, 5), batch=4),
        GraphSettings(loss="mse"),
    )  # fmt: skip
    x, p = numbers((4, 2, 3, 5), 2), numbers((1, 2, 3, 5), 1)
    h, expected = (x * p).astype(np.float64), np.zeros((4, 2, 3, 5))
    reads = [(*place[:batch_dims], *places[place]) for place in np.ndindex(shape[:-1])]
    count = sum(h[read].size for read in reads)
    for read in reads:
        expected[read] += 4 * h[read] ** 3 / count
    for threads in (1, 2):
        target = np.zeros((*shape[:-1], *h[reads[0]].shape), np.float32)
        found = run(graph, {"x": x, "target": target}, threads)
        np.testing.assert_allclose(found["p.grad"][0], (expected * x).sum(0), rtol=1e-4, atol=1e-7)


def test_values_by_an_index_before_the_batch():
    """As torch's newer exporter writes a linear interpolation: the indexed axis is moved to the front."""
    check("t = Transpose<perm=[1, 0, 2]>(h)\na = GatherND(t, i)\nb = Mul(a, a)\ny = Transpose<perm=[1, 0, 2]>(b)",
          (4, 2), {"i": np.array([[3], [0], [-1], [1], [3]])})  # fmt: skip


def test_the_largest_value_of_each_example_by_several_indices():
    check("t, i = TopK<axis=1>(h, k)\ny = GatherND<batch_dims=1>(h, i)", (5,), {"k": ints(1)})


def test_examples_in_an_order_that_the_graph_computes():
    """Backwards, along the batch axis. Constant indices would select fixed examples."""
    order = "s = Shape<start=0, end=1>(x)\nn = Squeeze(s)\nm = Sub(n, one)\nq = Range(zero, n, one)\nr = Sub(m, q)"
    constants = {"zero": np.int64(0), "one": np.int64(1)}
    check(f"{order}\na = Gather(h, r)\ny = Mul(a, a)", (3,), constants)
    check(f"{order}\nt = Transpose(h)\na = Gather<axis=1>(t, r)\nb = Mul(a, a)\ny = Transpose(b)", (3,), constants)
