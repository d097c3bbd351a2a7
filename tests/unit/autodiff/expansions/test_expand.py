"""Which nodes are replaced by others, under which names, and what a refusal says."""

import numpy as np
import onnx

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.expansions import EXPANSIONS
from edgeasync.autodiff.rules import INSTEAD, RULES, STOPPING
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import assert_same_values, forward, numbers
from tests.support.models.small_models import names, refused

NORM = "a, , , s = com.microsoft.SkipLayerNormalization(x, x, g)"
NORMS = f"{NORM}\nh = Mul(s, p)\nb = Mish(a)\nc = Add(b, h)\ny = Mish(c)"
PARAMETERS = {"g": numbers((4,), 1), "p": numbers((4,), 2)}


def operators(graph):
    return [node.op_type for node in onnx.load_model_from_string(graph.model).graph.node]


def test_frozen_nodes_stay_as_they_are():
    model, x = forward(NORMS, PARAMETERS, (4,)), numbers((3, 4))
    frozen = assert_same_values(model, x, freeze=("g",))
    check_graph(frozen.model, bytes_max=1 << 20)
    assert operators(frozen).count("SkipLayerNormalization") == operators(frozen).count("Mish") == 1
    whole = assert_same_values(model, x)
    assert names(whole) == ["g", "p"]
    assert not {"SkipLayerNormalization", "Mish"} & {*operators(whole)}


def test_frozen_nodes_that_devices_do_not_support_are_replaced():
    text = 'a = com.microsoft.FusedGemm<activation="Relu">(x, w)\nc = Add(a, p)\ny = Tanh(c)'
    model = forward(text, {"w": numbers((4, 4)), "p": numbers((4,))}, (4,))
    graph = assert_same_values(model, numbers((3, 4)), freeze=("w",))
    check_graph(graph.model, bytes_max=1 << 20)
    assert names(graph) == ["p"]


def test_a_refusal_says_which_parameters_to_freeze():
    text = "h = Mul(x, p)\na = Celu<alpha=-2.0>(h)\ny = Mul(a, w)"
    model = forward(text, {"p": numbers((1, 4)), "w": numbers((4,))}, (4,))
    refused(model, r"set a positive one, or freeze the parameters before it: freeze=\['p'\]$")
    assert names(build_training_graph(model, GraphSettings(loss="mse", freeze=("p",)))) == ["w"]


def test_new_names_are_unique():
    """Constants are added twice, before and after the shapes are known."""
    text = "h = Mul(x, p)\na = Celu<alpha=0.5>(h)\nb = Elu(a)\nc = Celu<alpha=0.25>(b)\ny = Elu<alpha=0.75>(c)"
    graph = onnx.load_model_from_string(
        assert_same_values(forward(text, {"p": numbers((1, 4))}, (4,)), numbers((3, 4))).model
    ).graph
    made = [name for node in graph.node for name in node.output] + [entry.name for entry in graph.initializer]
    assert len(made) == len(set(made))


def test_each_operator_has_either_a_rule_or_an_expansion():
    standard = {operator for domain, operator in EXPANSIONS if not domain}
    assert not standard & (RULES.keys() | INSTEAD.keys() | STOPPING)


def test_the_shape_of_a_result_may_be_used():
    text = "h = Mul(x, p)\na = Selu(h)\nn = Shape(a)\nb = Expand(w, n)\ny = Add(a, b)"
    assert_same_values(forward(text, {"p": numbers((1, 4)), "w": np.float32([2])}, (4,)), numbers((3, 4)))
