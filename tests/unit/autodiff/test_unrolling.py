"""Loops whose number of iterations is known become plain nodes; all others are refused by name."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.autodiff.unrolling import UNROLLED_MAX
from edgeasync.errors import GraphError
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import numbers, run, session

FLOATS, NUMBER, CHOICE = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
INPUTS = [("i", NUMBER), ("going", CHOICE), ("state", FLOATS)]


def typed(name, kind):
    return helper.make_tensor_value_info(name, kind, None if kind == FLOATS else [])


def loop(text, outputs, *, inputs=INPUTS, constants=None, nested=()):
    """Return the body of a loop from nodes written as text, one a line, and `nested` ones at the front."""
    nodes = [*nested, *[parser.parse_node(line) for line in text.strip().splitlines()]]
    results = [typed(name, CHOICE if place == 0 else FLOATS) for place, name in enumerate(outputs)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    return helper.make_graph(nodes, "body", [typed(*entry) for entry in inputs], results, tensors)


def model_of(body, before, after, parameters, *, batch="batch", inputs=("n", "yes", "h"), outputs=("last",)):
    node = helper.make_node("Loop", list(inputs), list(outputs), "the loop", body=body)
    nodes = [*[parser.parse_node(line) for line in before.splitlines()], node]
    nodes += [parser.parse_node(line) for line in after.splitlines()]
    constants = {"n": np.int64(3), "yes": np.array(True)} | parameters
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", FLOATS, [batch, 3])],
        [helper.make_tensor_value_info("y", FLOATS, [batch, None])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return model.SerializeToString()


def build(model):
    return build_training_graph(model, GraphSettings(loss="mse"))


CELL = "a = MatMul(state, w)\nb = Add(a, bias)\nnext = Tanh(b)\nstay = Identity(going)"
PARAMETERS = {"p": numbers((1, 3), 1), "w": numbers((3, 3), 2), "bias": numbers((3,), 3)}
UNROLLED = "h0 = Mul(x, p)\n" + "\n".join(
    f"a{turn} = MatMul(h{turn}, w)\nb{turn} = Add(a{turn}, bias)\nh{turn + 1} = Tanh(b{turn})" for turn in range(3)
)


def plain(text, parameters=PARAMETERS):
    """Return a model without a loop."""
    nodes = [parser.parse_node(line) for line in text.splitlines()]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", FLOATS, ["batch", 3])],
        [helper.make_tensor_value_info("y", FLOATS, ["batch", None])],
        [numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return model.SerializeToString()


def assert_alike(looped, unrolled):
    """Compare a step of both models, by one and two threads, and their predictions."""
    ours, theirs = build(looped), build(unrolled)
    check_graph(ours.model, bytes_max=1 << 20)
    for rows in (1, 4):
        x = numbers((rows, 3), 5)
        (y,) = session(looped).run(None, {"x": x})
        feeds = {"x": x, "target": numbers(y.shape, 6)}
        expected = run(theirs, feeds)
        for threads in (1, 2):
            found = run(ours, feeds, threads)
            assert {*found} == {*expected}
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("condition", ["Identity(going)", "Constant<value=bool {1}>()", "Cast<to=9>(one)"])
def test_a_loop_with_a_state(condition):
    body = loop(CELL.replace("Identity(going)", condition), ["stay", "next"], constants={"one": np.int64(1)})
    assert_alike(
        model_of(body, "h = Mul(x, p)", "y = Mul(last, last)", PARAMETERS), plain(f"{UNROLLED}\ny = Mul(h3, h3)")
    )


COUNTING = CELL.replace(
    "stay = Identity(going)",
    """\
count = Add(counter, step)
reached = Cast<to=1>(count)
below = Less(reached, end)
other = Less(i, n_max)
stay = And(other, below)""",
)
COUNTER = [("i", NUMBER), ("going", CHOICE), ("counter", TensorProto.INT32), ("state", FLOATS)]
ENDS = {"n_max": np.int64(10), "end": np.float32(5), "zero": np.int32(0)}


@pytest.mark.parametrize("trips", ["", "n", "many"])
@pytest.mark.parametrize("first", ["", "yes"])
def test_a_loop_that_a_counter_ends(trips, first):
    """tf2onnx writes such loops for recurrent layers: 0, 2, 4 are below 5."""
    parameters = PARAMETERS | ENDS | {"many": np.int64(2**40)}
    body = loop(COUNTING, ["stay", "count", "next"], inputs=COUNTER, constants={"step": np.int32(2)})
    body.output[1].CopyFrom(typed("count", TensorProto.INT32))
    looped = model_of(body, "h = Mul(x, p)", "y = Mul(last, last)", parameters,
                      inputs=(trips, first, "zero", "h"), outputs=("counted", "last"))  # fmt: skip
    assert_alike(looped, plain(f"{UNROLLED}\ny = Mul(h3, h3)"))


def test_a_loop_that_ends_at_the_length_of_the_data():
    """The loop carries its limit as a state. The first value of that state is a size of the input."""
    body = loop("step = Gather<axis=1>(h, i)\nb = Mul(state, step)\nnext = Tanh(b)\ncount = Add(counter, one)\n"
                "stay = Less(count, size)", ["stay", "count", "size", "next"],
                inputs=[*INPUTS[:2], ("counter", NUMBER), ("size", NUMBER), ("state", FLOATS)],
                constants={"one": np.int64(1)})  # fmt: skip
    for place, name in ((1, "count"), (2, "size")):
        body.output[place].CopyFrom(typed(name, NUMBER))
    before = (
        "h = Mul(x, p)\nshape = Shape<start=1, end=2>(h)\nlength = Squeeze(shape)\nfirst = Gather<axis=1>(h, zero)"
    )
    looped = model_of(body, before, "axis = Constant<value_ints=[1]>()\ny = Unsqueeze(last, axis)",
                      {"p": PARAMETERS["p"], "zero": np.int64(0)},
                      inputs=("", "", "zero", "length", "first"), outputs=("counted", "size", "last"))  # fmt: skip
    lines = ["h = Mul(x, p)", "axis = Constant<value_ints=[1]>()"]
    for turn in range(3):
        lines += [f"k{turn} = Constant<value_int={turn}>()", f"step{turn} = Gather<axis=1>(h, k{turn})"]
    lines += ["b0 = Mul(step0, step0)", "s1 = Tanh(b0)", "b1 = Mul(s1, step1)", "s2 = Tanh(b1)",
              "b2 = Mul(s2, step2)", "s3 = Tanh(b2)", "y = Unsqueeze(s3, axis)"]  # fmt: skip
    assert_alike(looped, plain("\n".join(lines), {"p": PARAMETERS["p"]}))


def test_a_loop_that_uses_a_parameter_of_equal_values():
    """The copies of a node are one use, so an exporter cannot have merged two parameters into this one."""
    zeros = PARAMETERS | {"bias": np.zeros(3, np.float32)}
    body = loop(CELL, ["stay", "next"])
    build(model_of(body, "h = Mul(x, p)", "y = Mul(last, last)", zeros))
    with pytest.raises(GraphError, match="may have merged two parameters"):
        build(model_of(body, "h = Mul(x, p)", "y = Add(last, bias)", zeros))


def test_a_loop_that_collects_its_states():
    """The first axis of what it collects is the iteration."""
    body = loop(CELL, ["stay", "next", "next"])
    after = "t = Transpose<perm=[1, 0, 2]>(all)\ny = Flatten(t)"
    looped = model_of(body, "h = Mul(x, p)", after, PARAMETERS, outputs=("unread", "all"))
    assert_alike(looped, plain(f"{UNROLLED}\ny = Concat<axis=1>(h1, h2, h3)"))


def test_a_loop_that_counts():
    """The number of the iteration selects the step of a sequence; the trip count follows from its shape."""
    body = loop("step = Gather<axis=1>(h, i)\nb = Mul(state, step)\nnext = Tanh(b)\nstay = Identity(going)",
                ["stay", "next"])  # fmt: skip
    before = (
        "h = Mul(x, p)\nsize = Shape<start=1, end=2>(h)\ncount = Squeeze(size)\nzero = Constant<value=int64 {0}>()"
        "\nfirst = Gather<axis=1>(h, zero)"
    )
    looped = model_of(body, before, "s = Mul(h, p)\nd = Shape<start=0, end=1>(s)\nm = Constant<value_ints=[1]>()\n"
                      "e = Concat<axis=0>(d, m)\ny = Reshape(last, e)",
                      {"p": PARAMETERS["p"]}, inputs=("count", "", "first"))  # fmt: skip
    lines = ["h = Mul(x, p)"]
    for turn in range(3):
        lines.append(f"k{turn} = Constant<value_ints=[{turn}]>()")
        lines.append(f"step{turn} = Gather<axis=1>(h, k{turn})")
    lines += ["b0 = Mul(step0, step0)", "s1 = Tanh(b0)", "b1 = Mul(s1, step1)", "s2 = Tanh(b1)",
              "b2 = Mul(s2, step2)", "y = Tanh(b2)"]  # fmt: skip
    assert_alike(looped, plain("\n".join(lines), {"p": PARAMETERS["p"]}))


def test_a_loop_within_a_loop():
    inner = loop("u = Mul(inside, w_row)\ndone = Tanh(u)\nagain = Identity(more)", ["again", "done"],
                 inputs=[("j", NUMBER), ("more", CHOICE), ("inside", FLOATS)])  # fmt: skip
    node = helper.make_node("Loop", ["two", "", "state"], ["inner"], "within", body=inner)
    outer = loop("next = Add(inner, h)\nstay = Identity(going)", ["stay", "next"], nested=[node],
                 constants={"two": np.int64(2)})  # fmt: skip
    parameters = {"p": PARAMETERS["p"], "w_row": numbers((3,), 7)}
    looped = model_of(outer, "g = Mul(x, p)\nh = Identity(g)", "y = Mul(last, last)", parameters)
    lines, state = ["h = Mul(x, p)"], "h"
    for turn in range(3):
        for part in range(2):
            lines += [f"u{turn}{part} = Mul({state}, w_row)", f"d{turn}{part} = Tanh(u{turn}{part})"]
            state = f"d{turn}{part}"
        lines.append(f"s{turn} = Add({state}, h)")
        state = f"s{turn}"
    assert_alike(looped, plain("\n".join([*lines, f"y = Mul({state}, {state})"]), parameters))


LONG = {"n": np.int64(UNROLLED_MAX)}
ENDING = CELL.replace("Identity(going)", "Less(total, limit)").replace(
    "stay", "total = ReduceSum<keepdims=0>(next)\nstay"
)
CHANCE = CELL.replace("Identity(going)", "Bernoulli<dtype=9>(odds)")
DATA = "the condition that ends it depends on the batch size or on data"
REFUSED = {
    "too many": (CELL, LONG, {}, "it has more than 1000 iterations, together over 4000 nodes"),
    "none": (CELL, {"n": np.int64(0)}, {}, "it has no iterations"),
    "an end that depends on data": (ENDING, {"limit": np.float32(99)}, {}, DATA),
    "an end by chance": (CHANCE, {"odds": np.float32(0.5)}, {}, DATA),
    "a start that depends on data": (CELL, {}, {"inputs": ("n", "any", "h")}, DATA),
    "a condition that is false": (CELL, {"yes": np.array(False)}, {}, "it has no iterations"),
    "no number": (ENDING, {"limit": np.float32(-99)}, {"inputs": ("", "yes", "h")}, DATA),
    "the batch": (CELL, {}, {"inputs": ("rows", "yes", "h")}, "its number of iterations depends on the batch"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_other_loops_are_refused(text, parameters, options, why):
    before = (
        "h = Mul(x, p)\ns = Shape<end=1>(h)\nrows = Squeeze(s)\nt = ReduceMax<keepdims=0>(x)\nany = Cast<to=9>(t)"
    )
    model = model_of(
        loop(text, ["stay", "next"]), before, "y = Mul(last, last)", PARAMETERS | parameters, **options
    )
    with pytest.raises(GraphError, match=rf"node 'the loop' \(Loop\) cannot be unrolled: {why}"):
        build(model)


def test_a_body_that_stops_gradients_is_refused():
    body = loop(CELL.replace("Tanh(b)", "Identity(b)"), ["stay", "next"])
    stop = next(node for node in body.node if node.output[0] == "next")
    stop.metadata_props.append(onnx.StringStringEntryProto(
        key="pkg.torch.onnx.class_hierarchy", value="['torch', 'aten.detach.default']"))  # fmt: skip
    with pytest.raises(GraphError, match="cannot be unrolled: its body detaches a tensor"):
        build(model_of(body, "h = Mul(x, p)", "y = Mul(last, last)", PARAMETERS))
