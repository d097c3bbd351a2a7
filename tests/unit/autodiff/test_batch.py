"""A batch size that a file fixes becomes dynamic only if examples do not affect each other."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.exported import written
from tests.support.models.gradients import forward, numbers, run, session, squares
from tests.support.models.small_models import MSE, names

TOKEN = {"t": numbers((1, 1, 4), 3), "w": numbers((4, 3), 1)}
NEAREST = 'mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"'
FREED = {
    "reshape": ("a = Reshape(x, s)\ny = MatMul(a, w)", {"s": np.array([1, 24]), "w": numbers((24, 3), 1)}, (6, 4)),
    "reshape, the rest inferred": (
        "a = Reshape(x, s)\ny = MatMul(a, w)",
        {"s": np.array([1, -1]), "w": numbers((24, 3), 1)},
        (6, 4),
    ),
    "windows": (
        "a = Reshape(x, s)\nb = MatMul(a, w)\nc = Tanh(b)\nd = Reshape(c, u)\ny = ReduceMean<keepdims=0>(d, one)",
        {"s": np.array([3, 2, 4]), "u": np.array([1, 6, 3]), "w": numbers((4, 3), 1), "one": np.array([1])},
        (6, 4),
    ),
    "slice": (
        "a = MatMul(x, w)\nb = Slice(a, zeros, ends, axes)\ny = ReduceMean<keepdims=0>(b, one)",
        {"w": numbers((4, 3), 1), "zeros": np.array([0, 1]), "ends": np.array([1, 5]), "axes": np.array([0, 1]),
         "one": np.array([1])},
        (6, 4),
    ),
    "class token": ("a = Concat<axis=1>(t, x)\nb = MatMul(a, w)\ny = ReduceMax<keepdims=0>(b, one)",
                    TOKEN | {"one": np.array([1])}, (6, 4)),
    "expanded": ("k = MatMul(x, w)\na = Expand(k, s)\ny = ReduceMax<keepdims=0>(a, one)",
                 {"w": numbers((4, 3), 1), "s": np.array([1, 6, 3]), "one": np.array([1])}, (6, 4)),
    "resize": (
        f"k = Mul(x, w)\nr = Resize<{NEAREST}>(k, , , s)\ny = ReduceMean(r, three)",
        {"w": numbers((2, 1, 1), 1), "s": np.array([1, 2, 6, 8]), "three": np.array([3])}, (2, 3, 4)),
    "recurrent state": (
        "a = Transpose<perm=[1, 0, 2]>(x)\nq, h = GRU<hidden_size=3>(a, w, r, , , i)\ny = Squeeze(h, zero)",
        {"w": numbers((1, 9, 4), 1), "r": numbers((1, 9, 3), 2), "i": np.full((1, 1, 3), 0.5, np.float32),
         "zero": np.array([0])},
        (6, 4),
    ),
    "recurrent, by times": (  # as torch's newer exporter writes a layer with batch_first
        ("a = Transpose<perm=[1, 0, 2]>(x)\nq = GRU<hidden_size=3>(a, w, r)\nb = Transpose<perm=[0, 2, 1, 3]>(q)\n"
        "c = Reshape(b, s)\nd = Transpose<perm=[1, 0, 2]>(c)\ny = Gather<axis=1>(d, last)"),
        {"w": numbers((1, 9, 4), 1), "r": numbers((1, 9, 3), 2), "s": np.array([6, 1, 3]), "last": np.array(-1)},
        (6, 4),
    ),
    "heads, by times": (  # times x (batch * heads) x 2
        ("a = Transpose<perm=[1, 0, 2]>(x)\nb = MatMul(a, w)\nc = Reshape(b, heads)\n"
        "d = Transpose<perm=[1, 0, 2]>(c)\ne = Softmax(d)\nf = Transpose<perm=[1, 0, 2]>(e)\n"
        "g = Reshape(f, joined)\ny = ReduceMean<keepdims=0>(g, zero)"),
        {"w": numbers((4, 6), 1), "heads": np.array([5, 3, 2]), "joined": np.array([5, 1, 6]),
         "zero": np.array([0])},
        (5, 4),
    ),
}  # fmt: skip


def batches(graph):
    return {
        entry.type.tensor_type.shape.dim[0].dim_param
        for entry in onnx.load_model_from_string(graph.model).graph.input
        if entry.name in ("x", "target")
    }


@pytest.mark.parametrize(("text", "parameters", "x"), FREED.values(), ids=FREED)
def test_a_file_of_one_example_trains_with_any_batch(text, parameters, x):
    data = forward(text, parameters, x, batch=1)
    graph = build_training_graph(data, MSE)
    assert batches(graph) == {"batch"}
    assert ["the file has the batch size 1, but trains with any" in said for said in graph.notes] == [True]
    values = numbers((5, *x), 7)
    y = np.concatenate([session(data).run(None, {"x": values[[row]]})[0] for row in range(5)])
    target = numbers(y.shape, 8)
    found = run(graph, {"x": values, "target": target}, 2)
    np.testing.assert_allclose(found["loss"], squares(y, target), rtol=1e-5)
    alone = [run(graph, {"x": values[[row]], "target": target[[row]]}) for row in range(5)]
    for name in found:
        if name.endswith(".grad"):
            np.testing.assert_allclose(
                found[name], np.mean([one[name] for one in alone], axis=0), rtol=1e-3, atol=1e-5
            )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_file_of_several_examples(size):
    text = "a = Reshape(x, s)\ny = MatMul(a, w)"
    data = forward(text, {"s": np.array([size, -1]), "w": numbers((24, 3), 1)}, (6, 4), batch=size)
    assert batches(build_training_graph(data, MSE)) == {"batch"}


@pytest.mark.parametrize("kind", ["zeros", "equal", "apart", "trained"])
def test_a_file_of_several_examples_with_a_state(kind):
    """An initial state becomes that of any batch if all examples have the same one, which is not trained."""
    state = {"zeros": np.zeros((1, 2, 3)), "apart": numbers((1, 2, 3), 3)}.get(kind, np.full((1, 2, 3), 0.5))
    text = "a = Transpose<perm=[1, 0, 2]>(x)\nq, h = GRU<hidden_size=3>(a, w, r, , , i)\ny = Squeeze(h, zero)"
    parameters = {"w": numbers((1, 9, 4), 1), "r": numbers((1, 9, 3), 2), "zero": np.array([0])}
    parameters["i"] = state.astype(np.float32)
    data = written(text, parameters, (6, 4), batch=2, constants=() if kind == "trained" else {"i"})
    graph = build_training_graph(data.SerializeToString(), MSE)
    assert batches(graph) == ({""} if kind in ("apart", "trained") else {"batch"})
    assert names(graph) == (["w", "r", "i"] if kind == "trained" else ["w", "r"])


ACROSS = {
    "a mean over the batch": "m = ReduceMean(a, zero)\ny = Add(a, m)",
    "shares of the batch": "y = Softmax<axis=0>(a)",
    "one answer for the whole batch": "y = ReduceSum(a, zero)",
    "a first row": "f = Slice(a, zero, first)\nm = Neg(f)\ny = Add(a, m)",
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", ACROSS.values(), ids=ACROSS)
def test_what_computes_across_the_batch_keeps_its_size(text, size):
    constants = {"zero": np.array([0])} | ({"first": np.array([1])} if "first" in text else {})
    data = forward(f"a = MatMul(x, w)\n{text}", {"w": numbers((4, 3), 1)} | constants, (4,), batch=size)
    if "first" in text and size == 1:
        return  # it may mean all examples
    graph = build_training_graph(data, GraphSettings(loss="mse"))
    assert batches(graph) == {""}
    assert any(f"the batch size stays {size}, as in the file, because" in said for said in graph.warnings)


def test_zeros_do_not_hide_that_examples_are_mixed():
    """The first row of the batch is added to all, times zero."""
    text = "a = MatMul(x, w)\nm = ReduceMean(a, zero)\nn = Mul(m, g)\ny = Add(a, n)"
    parameters = {"w": numbers((4, 3), 1), "g": np.zeros(3, np.float32), "zero": np.array([0])}
    graph = build_training_graph(forward(text, parameters, (4,), batch=1), MSE)
    assert batches(graph) == {""}


RARE = {
    "counted": "g = Greater(x, five)\nk = Cast<to=7>(g)\nm = ReduceMax<keepdims=0>(k)\nc = Cast<to=9>(m)",
    "by numbers": "g = Sub(x, five)\nk = Relu(g)\nm = ReduceSum<keepdims=0>(k)\nc = Cast<to=9>(m)",
}


@pytest.mark.parametrize("text", RARE.values(), ids=RARE)
def test_a_rare_value_of_one_example_must_not_change_the_others(text):
    """No random example has a value above 5, so the values of both runs are the same."""
    text = f"a = MatMul(x, w)\nb = Neg(a)\n{text}\ny = Where(c, b, a)"
    parameters = {"w": numbers((4, 3), 1), "five": np.float32(5)}
    graph = build_training_graph(forward(text, parameters, (4,), batch=1), MSE)
    assert batches(graph) == {""}
    (said,) = graph.warnings
    assert "because the values of 'm' for an example depend on the other examples of its batch" in said


def test_a_size_of_minus_1_is_the_batch():
    """As in files of paddle2onnx."""
    graph = build_training_graph(forward("y = MatMul(x, w)", {"w": numbers((4, 3), 1)}, (4,), batch=-1), MSE)
    assert batches(graph) == {"batch"}
    assert (graph.warnings, graph.notes) == ((), ())


def test_batch_norms_of_a_file_in_training_mode_do_not_fix_its_batch():
    """They use their running statistics while the file is verified, as in the exported model."""
    norm = {name: numbers((3,), seed, positive=True) for seed, name in enumerate("sbmv")}
    text = "a = MatMul(x, w)\ny, k, l = BatchNormalization<training_mode=1>(a, s, b, m, v)"
    graph = build_training_graph(forward(text, {"w": numbers((4, 3), 1)} | norm, (4,), batch=1), MSE)
    assert batches(graph) == {"batch"}


def test_what_trains_only_with_a_fixed_batch_keeps_it():
    text = """t = Transpose<perm=[1, 0, 2]>(x)
        k = Mul(t, w)
        v = Gather<axis=0>(k, i)
        y = Transpose<perm=[2, 0, 1, 3]>(v)"""
    parameters = {"w": numbers((4,), 1), "i": np.array([[0, 1], [1, 2]])}
    with pytest.raises(GraphError, match="depends on the batch size"):
        build_training_graph(forward(text, parameters, (6, 4)), MSE)
    graph = build_training_graph(forward(text, parameters, (6, 4), batch=2), MSE)
    assert batches(graph) == {""}
    (said,) = graph.warnings
    assert "only a fixed one can be trained: the Gather that computes 'v' has no gradient" in said
