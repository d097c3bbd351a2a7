"""Gradients of LSTM, GRU and RNN against differences of a forward pass in float64, written out in numpy."""

from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import forward, numbers

INPUTS, SAMPLES, STEP = 3, 6, 1e-5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HEADS = {"Y": [2, 0, 1, 3], "Y_h": [1, 0, 2], "Y_c": [1, 0, 2]}
"""The order that brings the batch of each output to the front."""


@dataclass(frozen=True)
class Case:
    kind: str
    direction: str = "forward"
    bias: bool = True
    initial: str = "none"
    used: tuple[str, ...] = ("Y",)
    layers: int = 1
    batch: int | None = None
    reset_after: int = 1
    opset: int = 18
    threads: int = 1
    times: int = 6
    hidden: int = 4
    attributes: tuple[tuple[str, object], ...] = ()

    @property
    def count(self):
        return 2 if self.direction == "bidirectional" else 1

    @property
    def examples(self):
        return self.batch or 5

    @property
    def states(self):
        if self.initial == "none":
            return []
        return ["h", "c"] if self.kind == "LSTM" else ["h"]

    def __str__(self):
        shown = [str(value) for name, value in vars(self).items() if value != getattr(Case, name, None)]
        return "-".join(shown)


LSTM, GRU = Case("LSTM"), Case("GRU")
BEFORE = Case("GRU", reset_after=0)
RNN = Case("RNN")
RELU = Case("RNN", attributes=(("activations", ["Relu"]),))
RELUS = [
    Case("LSTM", attributes=(("activations", ["Sigmoid", *functions]),))
    for functions in (("Relu", "Relu"), ("Relu", "Tanh"), ("tanh", "relu"))
]
"""As Keras writes an LSTM with the activation ReLU."""


def draw(case):
    """Return every parameter; those of the layers by the letters that ONNX gives them and the layer's number."""
    rng = np.random.default_rng(7)
    gates, hidden, count = GATES[case.kind], case.hidden, case.count
    shapes = {"shift": (case.times, INPUTS)}
    for layer in range(case.layers):
        width = count * hidden if layer else INPUTS
        shapes[f"W{layer}"] = (count, gates * hidden, width)
        shapes[f"R{layer}"] = (count, gates * hidden, hidden)
        if case.bias:
            shapes[f"B{layer}"] = (count, 2 * gates * hidden)
        for state in case.states:
            if case.initial == "computed":
                shapes[f"{state}{layer}"] = (INPUTS, count * hidden)
            elif case.initial == "trained":
                shapes[f"{state}{layer}"] = (count, case.examples, hidden)
    return {name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def fixed_state(case):
    fill = 0.0 if case.initial == "zeros" else 0.3
    return np.full((case.count, case.examples, case.hidden), fill, np.float32)


def initial_state(case, nodes, name):
    """Add what makes an initial state, from the parameter of that name if it is computed; return its tensor."""
    if case.initial == "computed":
        nodes.append(helper.make_node("MatMul", ["start", name], [f"{name}.flat"]))
        nodes.append(helper.make_node("Reshape", [f"{name}.flat", "rows"], [f"{name}.rows"]))
        nodes.append(helper.make_node("Transpose", [f"{name}.rows"], [f"{name}.state"], perm=[1, 0, 2]))
        return f"{name}.state"
    if case.initial != "trained":
        nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(fixed_state(case))))
    return name


def forward_model(case, parameters, *, lengths=None, peepholes=False):
    """Return x + shift through the layers, with the outputs in use side by side."""
    outputs = ["Y", "Y_h", "Y_c"][: 3 if case.kind == "LSTM" else 2]
    initializers = dict(parameters) | {"first": np.array(0), "rows": np.array([-1, case.count, case.hidden])}
    nodes = [helper.make_node("Add", ["x", "shift"], ["shifted"])]
    nodes.append(helper.make_node("Transpose", ["shifted"], ["X0"], perm=[1, 0, 2]))
    nodes.append(helper.make_node("Gather", ["shifted", "first"], ["start"], axis=1))
    for layer in range(case.layers):
        inputs = [f"X{layer}", f"W{layer}", f"R{layer}", f"B{layer}" if case.bias else "", ""]
        if lengths is not None:
            initializers["lengths"], inputs[4] = np.array(lengths, np.int32), "lengths"
        inputs += [initial_state(case, nodes, f"{state}{layer}") for state in case.states]
        if peepholes:
            inputs += [""] * (7 - len(inputs)) + ["P"]
            initializers["P"] = np.ones((case.count, 3 * case.hidden), np.float32)
        last = layer == case.layers - 1
        wanted = [f"{name}{layer}" if name in case.used or (name == "Y" and not last) else "" for name in outputs]
        while not wanted[-1]:
            wanted.pop()
        attributes = {"hidden_size": case.hidden, "direction": case.direction, **dict(case.attributes)}
        if "activations" in attributes:
            attributes["activations"] = attributes["activations"] * case.count
        if case.kind == "GRU":
            attributes["linear_before_reset"] = case.reset_after
        nodes.append(helper.make_node(case.kind, inputs, wanted, name=f"layer{layer}", **attributes))
        if not last:
            initializers["joined"] = np.array([0, 0, case.count * case.hidden])
            nodes.append(helper.make_node("Transpose", [f"Y{layer}"], [f"turned{layer}"], perm=[0, 2, 1, 3]))
            nodes.append(helper.make_node("Reshape", [f"turned{layer}", "joined"], [f"X{layer + 1}"]))
    for name in case.used:
        nodes.append(
            helper.make_node("Transpose", [f"{name}{case.layers - 1}"], [f"{name}.first"], perm=HEADS[name])
        )
        nodes.append(helper.make_node("Flatten", [f"{name}.first"], [f"{name}.flat"]))
    nodes.append(helper.make_node("Concat", [f"{name}.flat" for name in case.used], ["y"], axis=1))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [case.batch or "batch", case.times, INPUTS])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [case.batch or "batch", "width"])
    tensors = [numpy_helper.from_array(value, name) for name, value in initializers.items()]
    graph = helper.make_graph(nodes, "forward", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=9)
    return model.SerializeToString()


def sigmoid(value):
    return 1.0 / (1.0 + np.exp(-value))


def relu(value):
    return np.maximum(value, 0)


def lstm_step(case, x, state, maps):
    (h, c), (weights, recurrent, *biases) = state, maps
    i, o, f, g = np.split(x @ weights.T + h @ recurrent.T + sum(biases), 4, axis=-1)
    names = dict(case.attributes).get("activations", ["Sigmoid", "Tanh", "Tanh"])
    inner, outer = [relu if name.lower() == "relu" else np.tanh for name in names[1:]]
    c = sigmoid(f) * c + sigmoid(i) * inner(g)
    return sigmoid(o) * outer(c), c


def gru_step(case, x, state, maps):
    (h, c), (weights, recurrent, input_bias, state_bias) = state, maps
    x_z, x_r, x_n = np.split(x @ weights.T + input_bias, 3, axis=-1)
    h_z, h_r, h_n = np.split(h @ recurrent.T + state_bias, 3, axis=-1)
    z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
    if not case.reset_after:
        h_n = (r * h) @ recurrent[-case.hidden :].T + state_bias[-case.hidden :]
    n = np.tanh(x_n + (r * h_n if case.reset_after else h_n))
    return (1 - z) * n + z * h, c


def rnn_step(case, x, state, maps):
    (h, c), (weights, recurrent, *biases) = state, maps
    sums = x @ weights.T + h @ recurrent.T + sum(biases)
    return relu(sums) if case.attributes else np.tanh(sums), c


def layer_forward(case, sequence, parameters, layer, start):
    """Return Y, Y_h and Y_c as ONNX defines them."""
    step = {"LSTM": lstm_step, "GRU": gru_step, "RNN": rnn_step}[case.kind]
    every, last_h, last_c = [], [], []
    for index in range(case.count):
        weights, recurrent = parameters[f"W{layer}"][index], parameters[f"R{layer}"][index]
        bias = parameters[f"B{layer}"][index] if case.bias else np.zeros(2 * len(weights))
        state = {"h": np.zeros((len(start), case.hidden)), "c": np.zeros((len(start), case.hidden))}
        for name in case.states:
            if case.initial == "computed":
                state[name] = (start @ parameters[f"{name}{layer}"]).reshape(-1, case.count, case.hidden)[:, index]
            elif case.initial == "trained":
                state[name] = parameters[f"{name}{layer}"][index]
            else:
                state[name] = fixed_state(case)[index].astype(np.float64)
        h, c = state["h"], state["c"]
        order = range(len(sequence))
        states = np.zeros((len(sequence), *h.shape))
        for time in order if case.direction != "reverse" and not index else reversed(order):
            h, c = step(case, sequence[time], (h, c), (weights, recurrent, *np.split(bias, 2)))
            states[time] = h
        every.append(states)
        last_h.append(h)
        last_c.append(c)
    return {"Y": np.stack(every, 1), "Y_h": np.stack(last_h), "Y_c": np.stack(last_c)}


def reference_loss(case, parameters, x, target):
    shifted = x + parameters["shift"]
    sequence = shifted.transpose(1, 0, 2)
    for layer in range(case.layers):
        outputs = layer_forward(case, sequence, parameters, layer, shifted[:, 0])
        turned = outputs["Y"].transpose(0, 2, 1, 3)
        sequence = turned.reshape(*turned.shape[:2], -1)
    parts = [outputs[name].transpose(HEADS[name]).reshape(len(x), -1) for name in case.used]
    return float(((np.concatenate(parts, axis=1) - target) ** 2).mean())


def data(case):
    rng = np.random.default_rng(11)
    width = case.count * case.hidden * sum(case.times if name == "Y" else 1 for name in case.used)
    x = rng.normal(size=(case.examples, case.times, INPUTS)).astype(np.float32)
    return x, rng.normal(size=(case.examples, width)).astype(np.float32)


def run(case, model, x, target):
    graph = build_training_graph(model, GraphSettings(loss="mse"))
    onnx.checker.check_model(onnx.load_model_from_string(graph.model), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = onnxruntime.InferenceSession(graph.model, options, ["CPUExecutionProvider"])
    feeds = {**graph.spec.views(graph.initial), "x": x, "target": target}
    results = dict(zip([entry.name for entry in session.get_outputs()], session.run(None, feeds), strict=True))
    return graph, results


def check(case, **extra):
    drawn = draw(case)
    x, target = data(case)
    graph, results = run(case, forward_model(case, drawn, **extra), x, target)
    assert {parameter.name for parameter in graph.spec.parameters} == set(drawn)
    exact = {name: value.astype(np.float64) for name, value in drawn.items()}
    wide_x, wide_target = x.astype(np.float64), target.astype(np.float64)
    assert results["loss"] == pytest.approx(reference_loss(case, exact, wide_x, wide_target), rel=1e-5)
    rng = np.random.default_rng(13)
    for name, value in exact.items():
        found = results[f"{name}.grad"]
        assert found.shape == value.shape
        for place in rng.choice(value.size, min(SAMPLES, value.size), replace=False):
            flat, kept = value.reshape(-1), value.flat[place]
            flat[place] = kept + STEP
            above = reference_loss(case, exact, wide_x, wide_target)
            flat[place] = kept - STEP
            below = reference_loss(case, exact, wide_x, wide_target)
            flat[place] = kept
            error = abs(float(found.flat[place]) - (above - below) / (2 * STEP))
            assert error <= 1e-5 * np.abs(found).max(), (name, place)


DIRECTIONS = [
    replace(base, direction=direction, bias=bias)
    for base in (LSTM, *RELUS, GRU, BEFORE, RNN, RELU)
    for direction in ("forward", "reverse", "bidirectional")
    for bias in (True, False)
]
USES = [
    replace(base, used=used, direction=direction)
    for base, choices in (
        (LSTM, [("Y_h",), ("Y_c",), ("Y", "Y_h"), ("Y", "Y_h", "Y_c")]),
        (GRU, [("Y_h",), ("Y", "Y_h")]),
        (BEFORE, [("Y_h",)]),
        (RNN, [("Y_h",), ("Y", "Y_h")]),
    )
    for used in choices
    for direction in ("reverse", "bidirectional")
]
STATES = [
    replace(base, initial=initial, batch=batch, direction="bidirectional", used=("Y", "Y_h"))
    for base in (LSTM, *RELUS, GRU, BEFORE, RNN, RELU)
    for initial, batch in (("computed", None), ("trained", 4), ("zeros", 4), ("constant", 4))
]
OTHERS = [
    replace(base, **changes)
    for base in (LSTM, GRU, RNN)
    for changes in (
        {"layers": 2},
        {"layers": 2, "direction": "bidirectional", "initial": "computed", "used": ("Y_h",), "threads": 2},
        {"batch": 3},
        {"batch": 3, "used": ("Y_h",)},
        {"times": 1},
        {"hidden": 1},
        {"opset": 22},
        {"times": 40, "hidden": 16, "threads": 2},
    )
    if base is not RNN or "times" not in changes  # over that many steps, a plain layer amplifies rounding
]


@pytest.mark.parametrize(
    "case", [*DIRECTIONS, *USES, *STATES, *OTHERS, replace(RNN, times=40, hidden=2, threads=2)], ids=str
)
def test_gradients_agree_with_differences(case):
    check(case)


@pytest.mark.parametrize("case", [LSTM, GRU], ids=str)
def test_lengths_that_are_all_the_whole_are_none(case):
    check(replace(case, batch=4), lengths=[case.times] * 4)


@pytest.mark.parametrize("case", [LSTM, GRU], ids=str)
def test_activations_that_are_named_but_the_usual_ones_pass(case):
    names = ["sigmoid", "Tanh", "Tanh"][: 3 if case.kind == "LSTM" else 2]
    check(replace(case, attributes=(("activations", names),)))


@pytest.mark.parametrize("case", [LSTM, GRU], ids=str)
def test_a_batch_of_another_size_needs_no_other_graph(case):
    graph = build_training_graph(forward_model(case, draw(case)), GraphSettings(loss="mse"))
    session = onnxruntime.InferenceSession(graph.model, providers=["CPUExecutionProvider"])
    (x, target), feeds = data(case), graph.spec.views(graph.initial)
    whole = session.run(["W0.grad"], {**feeds, "x": x, "target": target})[0]
    single = [
        session.run(["W0.grad"], {**feeds, "x": x[at : at + 1], "target": target[at : at + 1]})[0]
        for at in range(len(x))
    ]
    np.testing.assert_allclose(np.mean(single, axis=0), whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("case", [LSTM, GRU], ids=str)
def test_only_what_is_trained_gets_a_gradient(case):
    model = forward_model(case, draw(case))
    graph = build_training_graph(model, GraphSettings(loss="mse", train=("R0",)))
    names = [entry.name for entry in onnx.load_model_from_string(graph.model).graph.output]
    assert [name for name in names if name.endswith(".grad")] == ["R0.grad"]


@pytest.mark.parametrize("layers", [1, 2])
def test_gates_of_an_lstm_are_computed_once(layers):
    """Each trained layer is a loop forward and one back. A frozen layer remains an operator."""
    case = replace(LSTM, layers=layers)
    graph = build_training_graph(forward_model(case, draw(case)), GraphSettings(loss="mse"))
    found = [node.op_type for node in onnx.load_model_from_string(graph.model).graph.node]
    assert (found.count("Scan"), found.count("LSTM"), found.count("Sigmoid")) == (2 * layers, 0, 0)
    frozen = GraphSettings(loss="mse", train=(f"[WRB]{layers - 1}",))
    graph = build_training_graph(forward_model(case, draw(case)), frozen)
    found = [node.op_type for node in onnx.load_model_from_string(graph.model).graph.node]
    assert (found.count("Scan"), found.count("LSTM")) == (2, layers - 1)


@pytest.mark.parametrize(
    ("base", "attributes", "why"),
    [
        (LSTM, {"clip": 2.0}, "clipped"),
        (GRU, {"clip": 2.0}, "clipped"),
        (LSTM, {"input_forget": 1}, "coupled"),
        (LSTM, {"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "activations are HardSigmoid"),
        (LSTM, {"activations": ["Sigmoid", "Relu", "Elu"]}, "Sigmoid, Relu, Elu instead of Sigmoid, Relu, Tanh"),
        (GRU, {"activations": ["Sigmoid", "Relu"]}, "activations are Sigmoid, Relu"),
        (RNN, {"activations": ["Affine"]}, "activations are Affine instead of Tanh"),
        (RNN, {"clip": 2.0}, "clipped"),
        # onnxruntime itself knows no other layout, and says so before any rule is asked.
        (LSTM, {"layout": 1}, "layout"),
        (GRU, {"layout": 1}, "layout"),
    ],
)
def test_variants_without_a_gradient_are_refused(base, attributes, why):
    case = replace(base, attributes=tuple(attributes.items()))
    with pytest.raises(GraphError, match=why):
        build_training_graph(forward_model(case, draw(case)), GraphSettings(loss="mse"))


def test_peepholes_are_refused():
    with pytest.raises(GraphError, match="peepholes"):
        build_training_graph(forward_model(LSTM, draw(LSTM), peepholes=True), GraphSettings(loss="mse"))


def test_directions_with_different_activations_are_refused():
    case = replace(RNN, direction="bidirectional", attributes=(("activations", ["Tanh", "Relu"]),))
    model = onnx.load_model_from_string(forward_model(case, draw(case)))
    (layer,) = [node for node in model.graph.node if node.op_type == "RNN"]
    (given,) = [entry for entry in layer.attribute if entry.name == "activations"]
    given.strings[:] = [b"Tanh", b"Relu"]
    with pytest.raises(GraphError, match="activations are Tanh, Relu instead of Tanh, Tanh"):
        build_training_graph(model.SerializeToString(), GraphSettings(loss="mse"))


@pytest.mark.parametrize("base", [LSTM, GRU, RNN], ids=str)
def test_lengths_of_their_own_are_refused(base):
    case = replace(base, batch=3)
    model = forward_model(case, draw(case), lengths=[case.times, 2, 1])
    with pytest.raises(GraphError, match="individual lengths"):
        build_training_graph(model, GraphSettings(loss="mse"))


@pytest.mark.parametrize("kind", GATES)
def test_two_free_sizes_are_refused(kind):
    """Every example is a time of a sequence that is as long as the batch is large."""
    text = f"t = Transpose(x)\ns = MatMul(x, t)\nX = Unsqueeze(s, two)\nall, last = {kind}<hidden_size=2>(X, W, R)"
    weights = {"W": numbers((1, 2 * GATES[kind], 1), 1), "R": numbers((1, 2 * GATES[kind], 2), 2)}
    places = {"two": np.array([2]), "zero": np.array([0])}
    model = forward(f"{text}\ny = Squeeze(last, zero)", weights | places, (3,))
    with pytest.raises(GraphError, match="both time and batch sizes are free"):
        build_training_graph(model, GraphSettings(loss="mse"))
