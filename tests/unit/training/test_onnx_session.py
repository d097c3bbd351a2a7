"""Sessions run the nodes of a training graph in its order, which needs the least memory."""

import json
from pathlib import Path
from types import SimpleNamespace

import onnxruntime

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training import onnx_session
from tests.support.models.gradients import forward, numbers

LAYERS = 4


def test_the_gradient_of_a_layer_precedes_that_of_the_layer_before(tmp_path, monkeypatch):
    """Otherwise the gradients of all activations would be kept until the end."""

    def profiled():
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return options

    monkeypatch.setattr(
        onnx_session, "onnxruntime", SimpleNamespace(**{**vars(onnxruntime), "SessionOptions": profiled})
    )
    text, parameters = ["h0 = Identity(x)"], {}
    for layer in range(LAYERS):
        text += [f"a{layer} = MatMul(h{layer}, w{layer})", f"h{layer + 1} = Tanh(a{layer})"]
        parameters[f"w{layer}"] = numbers((5, 5), layer)
    text.append(f"y = Neg(h{LAYERS})")
    graph = build_training_graph(forward("\n".join(text), parameters, (5,)), GraphSettings(loss="mse"))
    session = onnx_session.open_session(graph.model, 1, "cpu")
    x = numbers((3, 5), 9)
    session.run(None, {"x": x, "target": x, **graph.spec.views(graph.initial)})
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [event["name"].removesuffix("_kernel_time") for event in events if event["cat"] == "Node"]
    places = {name: place for place, name in enumerate(ran) if "Gemm" in name}
    weights = [max(place for name, place in places.items() if f"a{layer}" in name) for layer in range(LAYERS)]
    assert weights == sorted(weights, reverse=True)
    for layer in range(1, LAYERS):
        earlier = min(place for name, place in places.items() if f"a{layer - 1}" in name)
        assert weights[layer] < earlier
