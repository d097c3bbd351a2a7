"""Reading forward models: which are accepted, and which constants are folded."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.errors import GraphError
from tests.support.models.gradients import Reference, assert_slopes, check, forward, numbers, run, session, squares
from tests.support.models.small_models import MSE, edited, model, refused


def test_the_input_through_an_identity():
    check("y = Mul(h, w)", (3,), {"w": numbers((3,), 5)}, before="i = Identity(x)\nh = Mul(i, p)")


@pytest.mark.parametrize("before", ["h = Cast<to=1>(x)\na = Mul(h, p)", "a = Gather(p, x)"])
def test_whole_numbers_as_input(before):
    p = numbers((7, 3) if "Gather" in before else (3,), 1)
    data = model(f"{before}\ny = Tanh(a)", {"p": p}, (3,), kind=TensorProto.INT64)
    graph = build_training_graph(data, MSE)
    x = np.random.Generator(np.random.PCG64(1)).integers(0, 7, (4, 3))
    oracle = Reference(data)
    target = numbers(oracle(x).shape, 8)
    found = run(graph, {"x": x, "target": target}, 2)
    assert_slopes({"p": found["p.grad"]}, oracle, x, lambda y: squares(y, target))


def test_two_inputs():
    def given(proto):
        proto.graph.initializer.pop()
        proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3]))

    data = model("a = Mul(x, p)\ny = Add(a, z)", {"p": numbers((3,), 1), "z": np.float32(0)}, (3,))
    graph = build_training_graph(edited(data, given), MSE)
    x, z, target = (numbers((4, 3), seed) for seed in (2, 3, 4))
    found = run(graph, {"x": x, "z": z, "target": target})
    expected = (2 * (x * numbers((3,), 1) + z - target) * x).sum(0) / 12
    np.testing.assert_allclose(found["p.grad"], expected, rtol=1e-4)


def test_constants_of_shapes_are_folded_for_every_batch():
    """As exporters write `x.view(x.size(0), -1)`."""
    check("s = Shape(h)\nn = Gather(s, zero)\nu = Unsqueeze(n, first)\nt = Concat<axis=0>(u, minus)\n"
          "a = Reshape(h, t)\ny = Gemm(a, w)", (2, 3), {"zero": np.int64(0), "first": np.array([0]),
          "minus": np.array([-1]), "w": numbers((6, 2), 3)})  # fmt: skip


def test_a_batch_size_as_a_number():
    check("s = Shape(h)\nn = Gather(s, zero)\nf = Cast<to=1>(n)\na = Div(h, f)\ny = Mul(a, w)", (3,),
          {"zero": np.int64(0), "w": numbers((3,), 3)})  # fmt: skip


def test_a_cast_like_a_tensor_of_the_batch():
    check("z = Constant<value=float {2.0}>()\nc = CastLike(z, h)\na = Mul(h, c)\ny = CastLike(a, h)", (3,))


def test_a_free_size_besides_the_batch():
    refused(
        model(x=("length", 4)),
        r"input 'x' has the dynamic axis 1 \('length'\), but only axis 0, the batch, may be dynamic; fix its size "
        r"with python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param length --dim_value SIZE MODEL",
    )


def test_a_model_that_computes_in_float64():
    text = "h = Mul(x, p)\na = Cast<to=11>(h)\nb = Tanh(a)\ny = Cast<to=1>(b)"
    refused(model(text, {"p": numbers((4,))}), "computes in float64, but only float32 can be trained")
    refused(model("h = Mul(x, p)\ny = Cast<to=11>(h)", {"p": numbers((4,))}), "but only .*; set output='h'")


# -- what depends on the batch size, on sequences, or on what a body reads ---------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "k = Constant<value_ints=[4]>()\ns = Shape<start=0, end=1>(x)\nd = Div(s, k)",  # 0 at sizes 2 and 3
        "k = Constant<value_ints=[2]>()\ns = Shape<start=0, end=1>(x)\nd = Min(s, k)",  # 2 at both
    ],
)
def test_what_is_alike_at_two_batch_sizes_only_is_no_constant(text):
    data = forward(f"{text}\nf = Cast<to=1>(d)\nh = Mul(x, w)\ny = Add(h, f)", {"w": numbers((3,), 1)}, (3,))
    graph = build_training_graph(data, MSE)
    for rows in (1, 8):
        x, target = numbers((rows, 3), 2), numbers((rows, 3), 3)
        (y,) = session(data).run(None, {"x": x})
        np.testing.assert_allclose(run(graph, {"x": x, "target": target})["loss"], squares(y, target), rtol=1e-5)


@pytest.mark.parametrize("sizes", ["value_ints=[2, 4]", "value_int=4"])
def test_parts_of_a_sequence_are_parts_of_a_tensor(sizes):
    sequence = f"c = Constant<{sizes}>()\nq = SplitToSequence<axis=1>(h, c)"
    places = "i0 = Constant<value_int=0>()\ni1 = Constant<value_int=1>()"
    parts = "a = SequenceAt(q, i0)\nb = SequenceAt(q, i1)\ny = Concat<axis=1>(b, a)"
    data = forward(f"h = Mul(x, p)\n{sequence}\n{places}\n{parts}", {"p": numbers((6,), 1)}, (6,))
    x, target = numbers((4, 6), 2), numbers((4, 6), 3)
    y = session(data).run(None, {"x": x})[0]
    found = run(build_training_graph(data, MSE), {"x": x, "target": target})
    np.testing.assert_allclose(found["loss"], squares(y, target), rtol=1e-5)
    cut = 2 if "ints" in sizes else 4
    slope = 2 * (y - target) / y.size
    slope = np.concatenate([slope[:, 6 - cut :], slope[:, : 6 - cut]], axis=1)
    np.testing.assert_allclose(found["p.grad"], (slope * x).sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("place", ["value_int=2", "value_int=-3", "value_ints=[0, 1]"])
def test_a_part_that_its_sequence_does_not_have(place):
    sequence = "c = Constant<value_ints=[2, 4]>()\nq = SplitToSequence<axis=1>(h, c)"
    text = f"h = Mul(x, p)\n{sequence}\ni = Constant<{place}>()\ny = SequenceAt(q, i)"
    data = forward(text, {"p": numbers((6,), 1)}, (6,))
    with pytest.raises(GraphError, match="selects a tensor outside its sequence of 2 tensors"):
        build_training_graph(data, MSE)


def test_a_sequence_of_parts_without_a_length():
    text = "h = Mul(x, p)\nc = Constant<value_int=0>()\nq = SplitToSequence<axis=1>(h, c)"
    data = forward(f"{text}\ni = Constant<value_int=0>()\ny = SequenceAt(q, i)", {"p": numbers((6,), 1)}, (6,))
    with pytest.raises(GraphError, match="does not run"):
        build_training_graph(data, MSE)


def test_inputs_that_no_data_can_be_are_refused():
    data = model("h = Cast<to=1>(x)\ny = Mul(h, p)", {"p": numbers((1, 4))}, kind=TensorProto.UINT64)
    refused(
        data,
        "input 'x' is uint64, but a device's data is float32 or int64; "
        "export the model with an input of one of these",
    )
