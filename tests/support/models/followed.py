"""What a person does who is refused: exactly what the sentence says, until the model trains."""

import numpy as np
import onnx

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, arguments
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import session

STEPS = 20
TRIES = 4


def follow(model, settings=None):
    """Build a model's training graph by the advice of its refusals; return the graph, settings and refusals."""
    settings, refusals = settings or {}, []
    for _ in range(TRIES):
        try:
            graph = build_training_graph(model, GraphSettings(**settings))
        except GraphError as error:
            refusals.append(str(error))
            advice = advice_of(str(error))
            advice |= {"freeze": (*settings.get("freeze", ()), *advice["freeze"])} if "freeze" in advice else {}
            settings = settings | advice
        else:
            assert not any("\n" in said for said in refusals)
            return graph, settings, refusals
    raise AssertionError(f"still refused after {TRIES} tries: {refusals}")


def advice_of(sentence):
    """Return the arguments that a refusal names; of `freeze` or `train` the first. Fails if it names none."""
    found = arguments(sentence)
    if "freeze" in found:
        found.pop("train", None)
    assert found, f"nothing to follow in: {sentence}"
    return found


def assert_trains(graph, *, feeds=None, rate=0.1):
    """Screen and check a training graph, and take 20 steps: the loss is finite and falls."""
    check_graph(graph.model, bytes_max=1 << 20)
    for check in check_gradients(graph.model, graph.spec, graph.initial):
        assert check.passed, check
    losses = train(graph, feeds or examples(graph), rate)
    assert np.isfinite(losses).all(), losses
    assert losses[-1] < losses[0], losses


def train(graph, feeds, rate=0.1):
    """Return the losses of 20 steps of gradient descent on one batch."""
    opened = session(graph.model)
    names = [entry.name for entry in opened.get_outputs()]
    values = graph.spec.views(graph.initial.copy())
    losses = []
    for _ in range(STEPS):
        results = dict(zip(names, opened.run(names, feeds | values), strict=True))
        losses.append(float(results["loss"]))
        for name in values:
            if f"{name}.grad" in results:
                values[name] -= rate * results[f"{name}.grad"]
            else:
                values[name][...] = results[f"{name}.new"]
    return losses


def examples(graph, rows=16):
    """Return a batch for a training graph: random inputs, and targets that fit its loss."""
    generator = np.random.Generator(np.random.PCG64(0))
    proto = onnx.load_model_from_string(graph.model)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    trained = {parameter.name for parameter in graph.spec.parameters}
    feeds = {}
    for entry in proto.graph.input:
        if entry.name in trained:
            continue
        shape = [dim.dim_value or rows for dim in entry.type.tensor_type.shape.dim]
        values = generator.standard_normal(shape)
        if entry.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            high = int(metadata.get("edgeasync.classes", 2)) if entry.name == "target" else 2
            feeds[entry.name] = generator.integers(0, high, shape)
        elif entry.name == "target" and "bce" in metadata["edgeasync.loss"]:
            feeds[entry.name] = (values > 0).astype(np.float32)
        else:
            feeds[entry.name] = values.astype(np.float32)
    return feeds
