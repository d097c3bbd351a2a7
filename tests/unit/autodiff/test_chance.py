"""Training graphs without randomness."""

import numpy as np
import onnx

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.chance import without_chance
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.inspection import example_feeds
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward, numbers


def check(graph, **options):
    return check_gradients(graph.model, graph.spec, graph.initial, **options)


def test_a_mask_of_random_numbers_keeps_some_and_drops_some():
    """A constant in its place would keep all or nothing."""
    text = "u = RandomUniformLike(h)\nm = Less(u, half)\nk = Cast<to=1>(m)\ny = Mul(h, k)"
    parameters = {"p": numbers((1, 300), 1), "half": np.float32(0.5)}
    graph = build_training_graph(forward(f"h = Mul(x, p)\n{text}", parameters, (300,)), GraphSettings(loss="mse"))
    (check,) = check_gradients(graph.model, graph.spec, graph.initial)
    assert check.passed
    assert check.compared
    feeds = example_feeds(onnx.load_model_from_string(graph.model), graph.spec, 1)
    opened = open_session(without_chance(graph.model))
    once, again = [opened.run(["p.grad"], feeds | graph.spec.views(graph.initial))[0] for _ in range(2)]
    np.testing.assert_array_equal(once, again)
    assert 0.45 < (once != 0).mean() < 0.55
