"""What models end in: raw scores train, a last softmax or sigmoid is skipped, and everything else is refused by
a sentence that can be followed.
"""

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.followed import assert_trains, examples, follow
from tests.support.models.gradients import forward, numbers, run, session
from tests.support.models.small_models import model, refused

HEAD = "a = MatMul(x, w)\nh = Tanh(a)\nb = MatMul(h, v)\nz = Add(b, c)\n"
CONSTANTS = {
    "one": np.array([1]),
    "first": np.array([0]),
    "place": np.int64(1),
    "shape": np.array([-1, 3]),
    "unit": np.float32(1),
    "low": np.float32(1e-7),
    "small": np.float32(1e-3),
    "high": np.float32(1 - 1e-7),
    "zero": np.float32(0),
    "hundred": np.float32([100]),
    "half": np.float32(0.5),
    "smooth": np.float32(0.9),
    "rest": np.float32(0.1 / 3),
    "two": np.float32(2),
    "six": np.float32(6),
    "three": np.float32(3),
}


def ending(text, classes=3, output="y"):
    """Return a model of two layers whose scores are `z`, with what `text` makes of them."""
    parameters = {"w": numbers((4, 5), 1), "v": numbers((5, classes), 2), "c": numbers((classes,), 3)}
    words = set(text.replace(",", " ").replace("(", " ").replace(")", " ").split())
    constants = {name: value for name, value in CONSTANTS.items() if name in words}
    return forward(HEAD + text, parameters | constants, (4,), output=output)


CENTRED = "m = ReduceMax(z, one)\nd = Sub(z, m)\ne = Exp(d)\ns = ReduceSum(e, one)\n"
SIGMOID = "n = Neg(z)\ne = Exp(n)\ns = Add(e, unit)\n"

SKIPPED = {
    "softmax": ("y = Softmax<axis=1>(z)", "comes from Softmax"),
    "softmax by arithmetic, less the maximum": (f"{CENTRED}y = Div(e, s)", "a softmax by arithmetic"),
    "softmax as the exponential of its logarithm": ("l = LogSoftmax<axis=1>(z)\ny = Exp(l)", "a softmax by arith"),
    "softmax by logsumexp": (
        "l = ReduceLogSumExp(z, one)\nd = Sub(z, l)\ny = Exp(d)",
        "a softmax by arithmetic",
    ),
    "softmax, clipped": ("p = Softmax<axis=1>(z)\ny = Clip(p, low, high)", "comes from Softmax"),
    "softmax, clipped by reshaped bounds": (
        "p = Softmax<axis=1>(z)\nk = Unsqueeze(low, first)\nl = Squeeze(k)\ny = Clip(p, l, high)",
        "comes from Softmax",
    ),
    "logarithm of a softmax": ("p = Softmax<axis=1>(z)\ny = Log(p)", "the logarithm of Softmax"),
    "sigmoid": ("y = Sigmoid(z)", "comes from Sigmoid"),
    "sigmoid by arithmetic": (f"{SIGMOID}y = Div(unit, s)", "a sigmoid by arithmetic"),
    "sigmoid as a share": ("e = Exp(z)\ns = Add(e, unit)\ny = Div(e, s)", "a sigmoid by arithmetic"),
    "sigmoid by a tanh": (
        "i = Mul(z, half)\nt = Tanh(i)\nu = Add(t, unit)\ny = Mul(u, half)",
        "a sigmoid by arithmetic",
    ),
    "logarithm of a sigmoid": ("p = Sigmoid(z)\ny = Log(p)", "the logarithm of Sigmoid"),
    "logarithm of a sigmoid by arithmetic": (
        "n = Neg(z)\ns = Softplus(n)\ny = Neg(s)",
        "the logarithm of a sigmoid",
    ),
}
"""With each: what is said. The output is the softmax or sigmoid of `z`, or its logarithm."""

REFUSED = {
    "softmax in percent": ("p = Softmax<axis=1>(z)\ny = Mul(p, hundred)", "comes from Softmax"),
    "1 - softmax": ("p = Softmax<axis=1>(z)\ny = Sub(unit, p)", "comes from Softmax"),
    "logarithm of a softmax, kept from 0": (
        "p = Softmax<axis=1>(z)\nq = Add(p, small)\ny = Log(q)",
        "the logarithm of Softmax",
    ),
    "hard sigmoid": ("y = HardSigmoid(z)", "comes from HardSigmoid"),
    "hard sigmoid by arithmetic": (
        "a1 = Add(z, three)\nq = Div(a1, six)\ny = Clip(q, zero, unit)",
        "comes from Clip",
    ),
}


MADE_OF_PROBABILITIES = {
    "softmax, turned": ("p = Softmax<axis=1>(z)\ny = Neg(p)", "comes from Softmax", True),
    "softmax with gaps": (
        "p = Softmax<axis=1>(z)\ng = Greater(z, zero)\ny = Where(g, p, zero)",
        "comes from Softmax",
        True,
    ),
    "softmax twice": ("p = Softmax<axis=1>(z)\ny = Softmax<axis=1>(p)", "comes from Softmax", True),
    "mean of two softmaxes": (
        "p = Softmax<axis=1>(z)\nn = Neg(z)\nq = Softmax<axis=1>(n)\ns = Add(p, q)\ny = Mul(s, half)",
        "comes from rows that are positive and sum to 1",
        False,
    ),
    "softmax over the batch": ("y = Softmax<axis=0>(z)", "comes from Softmax", True),
    "LogSoftmax over the batch": ("y = LogSoftmax<axis=0>(z)", "comes from LogSoftmax", True),
    "LogSoftmax, turned": ("l = LogSoftmax<axis=1>(z)\ny = Neg(l)", "comes from LogSoftmax", True),
    "a tanh from 0 to 1": ("t = Tanh(z)\nu = Add(t, unit)\ny = Mul(u, half)", "stays between 0 and 1", True),
    "an angle's share": ("t = Sin(z)\nu = Add(t, unit)\ny = Mul(u, half)", "stays between 0 and 1", False),
    "scores cut off": ("y = Clip(z, zero, unit)", "comes from Clip", True),
    "a bent line from 0 to 1": ("r = Relu(z)\ny = Min(r, unit)", "stays between 0 and 1", True),
}
"""With each: what is said, and whether its scores can be named."""


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
@pytest.mark.parametrize(("text", "why", "named"), MADE_OF_PROBABILITIES.values(), ids=MADE_OF_PROBABILITIES)
def test_what_arithmetic_makes_of_probabilities_is_refused(text, why, named, loss):
    graph, settings, refusals = follow(ending(text), {"loss": loss})
    assert [why in said for said in refusals] == [True], refusals
    assert settings == ({"loss": loss, "output": "z"} if named else {"loss": "mse"})
    assert_trains(graph)


SINGLE = {
    "a distance's exponential": "q = Mul(z, z)\nd = ReduceSum(q, one)\nn = Neg(d)\ny = Exp(n)",
    "the largest of sigmoids": "p = Sigmoid(z)\ny = ReduceMax(p, one)",
    "any of several": "p = Sigmoid(z)\nq = Sub(unit, p)\nr = ReduceProd(q, one)\ny = Sub(unit, r)",
}


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
@pytest.mark.parametrize("text", SINGLE.values(), ids=SINGLE)
def test_a_probability_that_has_no_scores_is_trained_as_a_value(text, loss):
    graph, settings, refusals = follow(ending(text), {"loss": loss})
    assert len(refusals) == 1
    assert settings["loss"] == "mse"
    assert_trains(graph)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
def test_one_column_of_a_softmax_is_trained_as_all(loss):
    text = "p = Softmax<axis=1>(z)\ny = Gather<axis=1>(p, place)"
    graph, settings, refusals = follow(ending(text, classes=2), {"loss": loss})
    assert len(refusals) == 1, refusals
    assert settings == {"loss": "cross_entropy", "output": "z"}
    assert_trains(graph)


def test_one_value_for_each_example_may_be_no_class():
    with pytest.raises(GraphError, match="set loss='mse' for values, or loss='bce_with_logits' for the labels"):
        build_training_graph(ending("y = Identity(z)", classes=1), GraphSettings())


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
def test_scores_that_are_small_or_of_one_sign_train(loss):
    """The scores of a new model may be within 0 and 1, and those of another never below 0."""
    head = {"w": numbers((4, 5), 1), "v": 1e-4 * numbers((5, 3), 2), "c": np.float32([0.5, 0.4, 0.6])}
    for text, constants in {
        "y = Identity(z)": {},
        "y = Relu(z)": {},
        "q = Mul(z, z)\ny = Neg(q)": {},
        "t = Tanh(z)\ny = Mul(t, k)": {"k": np.float32(4)},
        "t = Tanh(z)\ny = Identity(t)": {},
    }.items():
        assert_trains(
            build_training_graph(forward(HEAD + text, head | constants, (4,)), GraphSettings(loss=loss)), rate=1.0
        )


@pytest.mark.parametrize(
    ("weight", "head"),
    [
        ("", {"v": np.full((5, 3), 0.01, np.float32)}),
        ("v = DequantizeLinear(q, s)\n", {"q": np.ones((5, 3), np.int8), "s": np.float32(0.01)}),
        (
            "t = DequantizeLinear(q, s)\nv = Transpose(t)\n",
            {"q": np.ones((3, 5), np.int8), "s": np.float32(0.01)},
        ),
    ],
)
def test_a_frozen_head_bounds_scores_without_being_their_ending(weight, head):
    text = f"{weight}a = MatMul(x, w)\nh = Sigmoid(a)\nb = MatMul(h, v)\ny = Add(b, c)"
    arrays = {"w": numbers((4, 5), 1), "c": np.float32([0.1, 0.2, 0.3]), **head}
    graph = build_training_graph(forward(text, arrays, (4,)), GraphSettings(train=("w",)))
    assert [entry.name for entry in graph.spec.parameters] == ["w"]


def trained_tensor(graph):
    return session(graph.model).get_modelmeta().custom_metadata_map["edgeasync.output"]


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
@pytest.mark.parametrize(("text", "why"), SKIPPED.values(), ids=SKIPPED)
def test_a_last_softmax_or_sigmoid_is_skipped_where_it_is_that_of_the_loss(text, why, loss):
    """A softmax of scores that are trained as yes or no would be none of their probabilities."""
    graph, settings, refusals = follow(ending(text), {"loss": loss})
    assert trained_tensor(graph) == "z"
    if loss == "cross_entropy" or "igmoid" in why:
        assert not refusals
        (said,) = graph.notes
        assert why in said
        assert f"{loss} trains the scores before it, 'z'" in said
    else:
        assert [why in said for said in refusals] == [True], refusals
        assert settings == {"loss": loss, "output": "z"}
    assert_trains(graph)
    plain = build_training_graph(
        ending(text.replace("y =", "q =") + "\ny = Identity(z)"), GraphSettings(loss=loss)
    )
    feeds = examples(graph)
    assert run(graph, feeds)["loss"] == run(plain, feeds)["loss"]


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_probabilities_are_refused_and_their_scores_train(text, why, loss):
    graph, settings, refusals = follow(ending(text), {"loss": loss})
    assert [why in said for said in refusals] == [True], refusals
    assert "set output='" in refusals[0]
    assert settings["loss"] == loss
    assert {entry.name for entry in graph.spec.parameters} >= {"w", "v", "c"}
    assert_trains(graph)


@pytest.mark.parametrize("text", ["y = Identity(z)", "y = Squeeze(z, one)", "y = Unsqueeze(z, one)"])
def test_one_score_is_refused_for_classes(text):
    graph, settings, refusals = follow(ending(text, classes=1))
    assert "has one score per example" in refusals[0]
    assert settings["loss"] == "bce_with_logits"
    assert_trains(graph)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("y = Sigmoid(z)", {}),
        (f"{SIGMOID}y = Reciprocal(s)", {}),
        ("p = Sigmoid(z)\nq = Sub(unit, p)\ny = Concat<axis=1>(q, p)", {"output": "z"}),
    ],
)
def test_a_probability_of_one_score_is_refused_with_all_flags_at_once(text, flags):
    graph, settings, refusals = follow(ending(text, classes=1))
    assert len(refusals) == 1
    assert settings == {"loss": "bce_with_logits"} | flags
    assert trained_tensor(graph) == "z"
    assert_trains(graph)


RIGHT = {
    "scores": ("y = Identity(z)", "cross_entropy"),
    "multi-label scores": ("y = Identity(z)", "bce_with_logits"),
    "LogSoftmax": ("y = LogSoftmax<axis=1>(z)", "cross_entropy"),
    "LogSoftmax by arithmetic": (f"{CENTRED}l = Log(s)\ny = Sub(d, l)", "cross_entropy"),
    "scores by a temperature": ("y = Div(z, two)", "cross_entropy"),
    "scores less their mean": ("m = ReduceMean(z, one)\ny = Sub(z, m)", "cross_entropy"),
    "positive scores": ("y = Softplus(z)", "cross_entropy"),
    "scores bounded on purpose": ("p = Sigmoid(z)\nq = Mul(p, six)\ny = Sub(q, three)", "cross_entropy"),
    "a gate": ("p = Sigmoid(z)\ny = Mul(z, p)", "cross_entropy"),
    "a gate of a softmax": ("p = Softmax<axis=1>(z)\ny = Mul(z, p)", "bce_with_logits"),
    "shares under a regression": ("y = Softmax<axis=1>(z)", "mse"),
    "a regression": ("y = Identity(z)", "huber"),
    "an embedding": ("q = Mul(z, z)\ns = ReduceSum(q, one)\nr = Sqrt(s)\ny = Div(z, r)", "l1"),
}


@pytest.mark.parametrize(("text", "loss"), RIGHT.values(), ids=RIGHT)
def test_scores_are_trained_as_they_are(text, loss):
    assert_trains(build_training_graph(ending(text), GraphSettings(loss=loss)))


def test_log_probabilities_are_no_scores_of_answers():
    for text in (RIGHT["LogSoftmax"][0], RIGHT["LogSoftmax by arithmetic"][0]):
        graph, settings, refusals = follow(ending(text), {"loss": "bce_with_logits"})
        assert "comes from LogSoftmax" in refusals[0]
        assert settings["output"] == "z"
        assert_trains(graph)


def test_shares_without_scores():
    """Values over their sum are not made of scores that a loss could take instead."""
    graph, settings, refusals = follow(ending("q = Softplus(z)\ns = ReduceSum(q, one)\ny = Div(q, s)"))
    assert "rows that are positive and sum to 1" in refusals[0]
    assert settings["loss"] == "mse"
    assert_trains(graph)


def test_classes_at_another_axis_are_not_the_loss_s():
    parameters = {"w": numbers((4, 3), 1)}
    model = forward("z = MatMul(x, w)\ny = Softmax(z)", parameters, (6, 4))
    turned = forward("z = MatMul(x, w)\np = Softmax(z)\ny = Transpose<perm=[0, 2, 1]>(p)", parameters, (6, 4))
    for each in (model, turned):
        graph, settings, refusals = follow(each)
        assert "export the scores instead, with the classes on axis 1, or set loss='mse'" in refusals[0]
        assert settings == {"loss": "mse"}
        assert_trains(graph)
    raw = forward("z = MatMul(x, w)\ny = Transpose<perm=[0, 2, 1]>(z)", parameters, (6, 4))
    assert_trains(build_training_graph(raw, GraphSettings()))


def test_scores_of_a_new_model_that_are_all_0():
    model = forward(
        "z = MatMul(x, w)\ne = Exp(z)\ns = ReduceSum(e, one)\ny = Div(e, s)",
        {"w": np.zeros((4, 3), np.float32), "one": np.array([1])},
        (4,),
    )
    assert trained_tensor(build_training_graph(model, GraphSettings())) == "z"
    zeros = forward(
        "z = MatMul(x, w)\ny = Add(z, b)",
        {"w": np.zeros((4, 3), np.float32), "b": np.full(3, 1 / 3, np.float32)},
        (4,),
    )
    assert_trains(build_training_graph(zeros, GraphSettings(train=("w", "b"))))


def test_a_model_that_runs_on_no_random_input_is_judged_by_its_operators():
    """The table has one row, and a random index may be 1."""
    text = "g = Gather(t, x)\nr = Squeeze(g, one)\nz = MatMul(r, w)\ny = Softmax<axis=1>(z)"
    parameters = {"t": numbers((1, 4), 1), "w": numbers((4, 3), 2), "one": np.array([1])}
    graph = build_training_graph(forward(text, parameters, (1,), kind=7), GraphSettings())
    assert trained_tensor(graph) == "z"
    turned = forward(text.replace("y =", "p =") + "\ny = Neg(p)", parameters, (1,), kind=7)
    assert trained_tensor(build_training_graph(turned, GraphSettings())) == "y"


STEPS = "a = MatMul(x, w)\nz = Add(a, c)\n"


@pytest.mark.parametrize(
    ("text", "loss", "told"),
    [
        ("y = Identity(z)", "cross_entropy", True),
        ("y = Identity(z)", "mse", False),
        ("y = Transpose <perm = [0, 2, 1]> (z)", "cross_entropy", False),
        ("y = ReduceMean <keepdims = 0> (z, one)", "cross_entropy", False),
    ],
)
def test_classes_in_the_last_axis_are_told_though_the_shapes_may_fit(text, loss, told):
    constants = {"one": CONSTANTS["one"]} if "one" in text else {}
    model = forward(STEPS + text, {"w": numbers((4, 3), 1), "c": numbers((3,), 2)} | constants, (3, 4), output="y")
    warnings = build_training_graph(model, GraphSettings(loss=loss)).warnings
    assert ["transpose the output, in torch with scores.movedim(2, 1)" in said for said in warnings] == [
        True
    ] * told


def test_a_loss_is_no_score():
    with pytest.raises(
        GraphError, match=r"the output has shape \(\); choose the scores as the output, not a loss"
    ):
        build_training_graph(ending("y = ReduceMean <keepdims = 0> (z)"), GraphSettings())


def test_the_scores_of_a_label_are_named():
    data = model("z = MatMul(x, w)\ny = ArgMax<axis=1, keepdims=0>(z)", {"w": numbers((4, 3), 1)})
    why = (
        "output 'y' is int64, but only a float32 tensor can be trained; set output='z', from which it is computed"
    )
    refused(data, why, loss="cross_entropy")
    build_training_graph(data, GraphSettings(output="z"))
