"""What a step in a process of its own measures, and how it fails."""

import pytest

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.graphs.step_process import STEPS_MAX, measure_step, time_steps


def graph(width):
    layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    return build_training_graph(nn.to_onnx(layers, (width,)).SerializeToString(), GraphSettings())


def measure(built, batch_size=4, *, s_max=60.0, bytes_max=1 << 32):
    return measure_step(built.model, built.spec, batch_size, threads=1, s_max=s_max, bytes_max=bytes_max)


LIBRARIES_SPREAD_BYTES = 1 << 20
"""The peak memory of two processes that import the same libraries differs by less than this."""


def test_a_larger_model_needs_its_memory():
    """Parameters and gradient, and two copies at most of what onnxruntime reads in place."""
    small, large = graph(8), graph(2000)
    memory = [measure(each).memory_bytes for each in (small, large)]
    nbytes = 4 * large.spec.length
    assert 2 * nbytes - LIBRARIES_SPREAD_BYTES < memory[1] - memory[0] < 4 * nbytes


def test_every_kind_of_data_is_made_up():
    """Tokens and class numbers must be in range, and several inputs have a common batch."""
    layers = nn.Sequential(nn.Embedding(3, 4), nn.MeanOverTime(), nn.Linear(4, 2))
    built = build_training_graph(nn.to_onnx(layers, (9,)).SerializeToString(), GraphSettings())
    assert measure(built, 7).examples == 7


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"bytes_max": 20 << 20}, "not enough memory"),
        ({"s_max": 1e-3}, "the first steps took longer than 0.001 s"),
    ],
)
def test_a_step_that_fails_says_why(limits, reason):
    with pytest.raises(GraphError, match=reason):
        measure(graph(2000), 4, **limits)


def test_the_first_step_does_not_count():
    taken = []
    assert time_steps(lambda: taken.append(1)) < 0.1
    assert len(taken) == 1 + STEPS_MAX
