"""Training graphs that compute norms and activations twice: the same gradients in less memory."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.graph import free_inputs, read_nodes
from edgeasync.autodiff.inspection import example_feeds, run_with_every_tensor
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward, numbers

BODY = """
c1 = Conv<pads=[1, 1, 1, 1]>(x, k1)
n1 = BatchNormalization(c1, s1, b1, m1, v1)
r1 = Relu(n1)
c2 = Conv<pads=[1, 1, 1, 1]>(r1, k2)
n2 = BatchNormalization(c2, s2, b2, m2, v2)
g2 = Sigmoid(n2)
w2 = Mul(n2, g2)
c3 = Conv<pads=[1, 1, 1, 1]>(w2, k3)
n3 = BatchNormalization(c3, s3, b3, m3, v3)
a3 = Add(n3, r1)
l3 = Clip(a3, low, high)
d3 = Dropout(l3, ratio)
c4 = Conv<pads=[1, 1, 1, 1]>(d3, k4)
e4 = LeakyRelu<alpha=0.1>(c4)
p4 = GlobalAveragePool(e4)
f4 = Flatten(p4)
l4 = LayerNormalization<axis=1>(f4, s4, b4)
q5 = MatMul(l4, k5)
h5 = Gelu(q5)
y = MatMul(h5, k6)
"""
WIDTH = 8
RESULTS = ("loss", "y", "k1.grad", "k6.grad", "s1.grad", "v3.new")


def model():
    parameters = {"low": np.float32(0.0), "high": np.float32(6.0), "ratio": np.float32(0.3)}
    parameters["k1"] = numbers((WIDTH, 3, 3, 3), 10)
    for place in (2, 3, 4):
        parameters[f"k{place}"] = 0.2 * numbers((WIDTH, WIDTH, 3, 3), 10 + place)
    for place in (1, 2, 3):
        parameters[f"m{place}"] = numbers((WIDTH,), 20 + place)
        parameters[f"v{place}"] = numbers((WIDTH,), 30 + place, positive=True)
    for place in (1, 2, 3, 4):
        parameters[f"s{place}"] = numbers((WIDTH,), 40 + place, positive=True)
        parameters[f"b{place}"] = numbers((WIDTH,), 50 + place)
    parameters |= {"k5": numbers((WIDTH, 16), 60), "k6": numbers((16, 4), 61)}
    return forward(BODY, parameters, (3, 12, 12), opset=20)


def build(*, recompute):
    return build_training_graph(model(), GraphSettings(loss="mse", recompute=recompute))


def run(graph):
    """Run two steps with the same random numbers, in the order of the graph; return the second's results."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    session = onnxruntime.InferenceSession(graph.model, options, ["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    feeds = {"x": numbers((6, 3, 12, 12), 1), "target": numbers((6, 4), 2)} | graph.spec.views(graph.initial)
    onnxruntime.set_seed(7)
    session.run(names, feeds)
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_the_gradients_are_the_same_to_the_last_bit():
    once, twice = run(build(recompute=False)), run(build(recompute=True))
    assert {*RESULTS} <= once.keys() == twice.keys()
    for name, value in once.items():
        np.testing.assert_array_equal(twice[name], value, err_msg=name)
        assert np.isfinite(value).all()


def peak_bytes(graph):
    """Return the most bytes that live tensors take if the nodes run in the order of the graph."""
    proto = onnx.load_model_from_string(graph.model)
    values = run_with_every_tensor(proto, example_feeds(proto, graph.spec, 64))
    nodes = read_nodes(proto.graph.node)
    last = {name: place for place, node in enumerate(nodes) for name in free_inputs(node)}
    alive = peak = 0
    ending = Counter()
    for place, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            alive += values[name].nbytes
            ending[last.get(name, len(nodes))] += values[name].nbytes
        peak = max(peak, alive)
        alive -= ending[place]
    return peak


def test_a_step_needs_less_memory():
    once, twice = (build(recompute=recompute) for recompute in (False, True))
    assert peak_bytes(twice) < 0.9 * peak_bytes(once)


def test_onnxruntime_keeps_the_second_computation_and_random_numbers_are_drawn_once(tmp_path):
    """Its optimizer merges equal nodes, which would keep the first results in memory again."""
    counts = []
    for recompute in (False, True):
        options, file = onnxruntime.SessionOptions(), tmp_path / "optimized.onnx"
        options.optimized_model_filepath = str(file)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(build(recompute=recompute).model, options, ["CPUExecutionProvider"])
        counts.append(Counter(node.op_type for node in onnx.load(file).graph.node))
    more = counts[1] - counts[0]
    assert more["BatchNormalization"] == 2  # that of the residual sum has two roots
    assert [more[name] for name in ("Relu", "Gelu", "LayerNormalization")] == [1, 1, 1]
    assert counts[1]["Dropout"] == 1
