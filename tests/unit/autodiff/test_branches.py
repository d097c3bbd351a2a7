"""If nodes are replaced by the nodes of their branches, and compute the same."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import forward, numbers, run, session, squares
from tests.support.models.small_models import MSE, names, refused

W = {"w": numbers((4, 3), 1)}


def branch(text, *, result="r", weights=None):
    nodes = [parser.parse_node(line) for line in text.strip().splitlines()]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    out = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, "branch", [], out, held)


def branching(before, then, other, *, parameters=W, batch="batch", x=(4,), after=""):
    """Return a model with an If of the condition `c`, which gives `y`."""
    model = onnx.load_model_from_string(
        forward(f"{before}\ny = Identity(h)", parameters, x, batch=batch, output="y")
    )
    model.graph.node.pop()
    model.graph.node.append(
        helper.make_node("If", ["c"], ["i"], then_branch=then, else_branch=other, name="choice")
    )
    model.graph.node.extend(parser.parse_node(line) for line in (after or "y = Identity(i)").splitlines())
    return model.SerializeToString()


def operators(graph):
    return {node.op_type for node in onnx.load_model_from_string(graph.model).graph.node}


def loss_of(data, x, target):
    return squares(session(data).run(None, {"x": x})[0], target)


CONDITIONS = {
    "constant": "k = Constant<value = bool {{{}}}>()\nc = Identity(k)",
    "shape": "s = Shape(x)\ng = Gather(s, one)\nk = Constant<value_int={}>()\nc = Equal(g, k)",
}


@pytest.mark.parametrize(
    ("condition", "taken"),
    [("constant", 1), ("constant", 0), ("shape", 4), ("shape", 5)],
)
def test_a_condition_that_never_changes_leaves_one_branch(condition, taken):
    before = f"h = MatMul(x, w)\n{CONDITIONS[condition].format(taken)}"
    parameters = W | ({"one": np.int64(1)} if condition == "shape" else {})
    data = branching(before, branch("t = Tanh(h)\nr = Mul(t, t)"), branch("r = Hardmax(h)"), parameters=parameters)
    if taken in (1, 4):
        graph = build_training_graph(data, MSE)
        assert not operators(graph) & {"If", "Where", "Hardmax"}
        x, target = numbers((5, 4), 2), numbers((5, 3), 3)
        np.testing.assert_allclose(
            run(graph, {"x": x, "target": target})["loss"], loss_of(data, x, target), rtol=1e-5
        )
    else:
        refused(data, "no gradient for Hardmax")


def test_branches_use_the_same_names_and_contain_others_and_weights():
    tanh = branch("t = Tanh(h)\nq = Mul(t, v)", result="q", weights={"v": numbers(3, 5)})
    inner = helper.make_graph(
        [helper.make_node("If", ["c"], ["r"], then_branch=tanh, else_branch=branch("q = Neg(h)", result="q"))],
        "inner", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
    )  # fmt: skip
    before = "s = MatMul(x, w)\nh = Sigmoid(s)\nk = Constant<value = bool {1}>()\nc = Identity(k)"
    data = branching(before, inner, branch("t = Exp(h)\nr = Neg(t)"))
    graph = build_training_graph(data, MSE)
    assert names(graph) == ["w", "v"]
    x, target = numbers((5, 4), 2), numbers((5, 3), 3)
    np.testing.assert_allclose(run(graph, {"x": x, "target": target})["loss"], loss_of(data, x, target), rtol=1e-5)
    trained = {"w": numbers((4, 3), 7), "v": numbers(3, 8)}
    (y,) = session(export_model(data, trained)).run(None, {"x": x})
    np.testing.assert_allclose(y, np.tanh(1 / (1 + np.exp(-x @ trained["w"]))) * trained["v"], rtol=1e-5)
    assert session(export_model(data, {"w": trained["w"]})).run(None, {"x": x})[0].shape == (5, 3)


DATA = "h = MatMul(x, w)\np = ReduceMax(h, axes)\nc = Greater(p, one)"
DATA_PARAMETERS = W | {"axes": np.array([1]), "one": np.float32(1), "v": numbers((3, 3), 5)}


def test_a_condition_of_the_data_chooses_for_each_example():
    """As a second network that verifies the answer of the first; the file has a batch of one."""
    data = branching(DATA, branch("r = MatMul(h, v)"), branch("r = Tanh(h)"), parameters=DATA_PARAMETERS, batch=1)
    graph = build_training_graph(data, MSE)
    assert ["node 'choice' (If) chooses by the data" in said for said in graph.notes].count(True) == 1
    x, target = numbers((8, 4), 2), numbers((8, 3), 3)
    w, v = DATA_PARAMETERS["w"], DATA_PARAMETERS["v"]
    taken = (x @ w).max(axis=1) > 1
    assert 0 < taken.sum() < 8
    found = run(graph, {"x": x, "target": target})
    losses = [loss_of(data, x[[row]], target[[row]]) for row in range(8)]
    np.testing.assert_allclose(found["loss"], np.mean(losses), rtol=1e-5)
    slope = 2 * ((x @ w) @ v - target)[taken] / target.size
    np.testing.assert_allclose(found["v.grad"], (x @ w)[taken].T @ slope, rtol=1e-4, atol=1e-6)
    exported = export_model(data, {"w": w, "v": v})
    assert "If" in {node.op_type for node in onnx.load_model_from_string(exported).graph.node}


def nested(depth):
    """Return a branch with If nodes in both branches of If nodes, down to this depth."""
    if depth == 0:
        return branch("r = Tanh(h)")
    inner = helper.make_node("If", ["c"], ["r"], then_branch=nested(depth - 1), else_branch=nested(depth - 1))
    return helper.make_graph([inner], "b", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])


def test_many_branches_are_told_in_one_note():
    data = branching(DATA, nested(2), branch("r = Neg(h)"), parameters=DATA_PARAMETERS, batch=1)
    *_, said = build_training_graph(data, MSE).notes
    assert said.startswith("node 'choice' (If) and 3 other If nodes choose by the data; ")


def test_more_branches_than_can_be_replaced_are_refused_at_once():
    data = branching(DATA, nested(10), branch("r = Neg(h)"), parameters=DATA_PARAMETERS, batch=1)
    refused(data, "the model has 1024 If nodes, over the limit of 1000")


def test_sigmoids_of_both_branches_have_common_scores():
    then = branch("a = MatMul(h, v)\nr = Sigmoid(a)")
    before = f"{DATA}\ns = Sigmoid(h)"
    data = branching(before, then, branch("r = Identity(s)"), parameters=DATA_PARAMETERS, batch=1)
    graph = build_training_graph(data, GraphSettings(loss="bce_with_logits"))
    assert any("trains the scores before it, 'i::scores'" in said for said in graph.notes)
    x = numbers((6, 4), 2)
    target = (numbers((6, 3), 3) > 0).astype(np.float32)
    p = np.concatenate([session(data).run(None, {"x": x[[row]]})[0] for row in range(6)]).astype(np.float64)
    expected = -np.mean(target * np.log(p) + (1 - target) * np.log(1 - p))
    np.testing.assert_allclose(run(graph, {"x": x, "target": target})["loss"], expected, rtol=1e-4)


def test_results_of_different_shapes_are_refused():
    one = branch("r = ReduceMax(h, axes)")
    data = branching(DATA, one, branch("r = Tanh(h)"), parameters=DATA_PARAMETERS, batch=1)
    with pytest.raises(
        GraphError, match=r"node 'choice' \(If\) chooses by the data between results of the shapes"
    ):
        build_training_graph(data, MSE)


def test_a_rare_condition_over_the_batch_is_refused():
    """No random example has a value above 5, so every one takes the same branch."""
    before = ("h = MatMul(x, w)\ng = Greater(x, five)\nk = Cast<to=7>(g)\nm = ReduceMax<keepdims=0>(k)\n"
              "c = Cast<to=9>(m)")  # fmt: skip
    data = branching(before, branch("r = Neg(h)"), branch("r = Tanh(h)"), batch="batch",
                     parameters=W | {"five": np.float32(5)})  # fmt: skip
    refused(data, "chooses by the data, and cannot be computed for each example: the values of 'm'")


@pytest.mark.parametrize("batch", ["batch", 1])
def test_a_condition_over_the_batch_is_refused_or_holds_for_the_whole_batch(batch):
    before = "h = MatMul(x, w)\np = ReduceMax<keepdims=0>(h)\nc = Greater(p, zero)"
    data = branching(before, branch("r = Neg(h)"), branch("r = Tanh(h)"), batch=batch,
                     parameters=W | {"zero": np.float32(0)})  # fmt: skip
    if batch == 1:
        graph = build_training_graph(data, MSE)
        assert any("the batch size stays 1" in said for said in graph.warnings)
    else:
        refused(data, "chooses by the data, and cannot be computed for each example")
