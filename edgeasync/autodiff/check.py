"""Holding a training graph's gradients against differences of its loss."""

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from edgeasync.autodiff.graph import Array
from edgeasync.autodiff.inspection import example_feeds
from edgeasync.errors import GraphError
from edgeasync.parameters import ParameterSpec, Vector

TOLERANCE = 0.02
"""How far a gradient may be from the difference, as a share: float32 and bends in the loss allow no better."""

STEP_SIZES = (1e-2, 3e-3, 1e-3)
"""Differences are taken over several steps, relative to the parameter's size; the nearest one counts."""

LOSS = "loss"


class GradientCheck(msgspec.Struct, frozen=True):
    """For one parameter: the slope of the loss by its gradient and by a difference, along the same direction."""

    name: str
    slope: float
    difference: float
    error: float
    passed: bool


def check_gradients(
    model: bytes, spec: ParameterSpec, initial: Vector, *, batch_size: int = 8, seed: int = 0
) -> list[GradientCheck]:
    """Compare gradients with central differences of the loss, for each trained parameter in two directions.

    One direction is the gradient itself, the other a random sign for every value, which weighs them alike. The
    worse of both is returned. Dropout is off meanwhile. The examples are random.
    """
    session = _session(model)
    generator = np.random.Generator(np.random.PCG64(seed))
    proto = onnx.load_model_from_string(model)
    feeds = example_feeds(proto, spec, batch_size, seed)
    _limit_targets(proto, feeds)
    values = spec.views(initial.copy())
    feeds |= values
    trained = [parameter.name for parameter in spec.parameters if parameter.role == "trained"]
    gradients = dict(zip(trained, session.run([f"{name}.grad" for name in trained], feeds), strict=True))
    checks = []
    for name in trained:
        gradient = gradients[name].astype(np.float64)
        norm = float(np.linalg.norm(gradient))
        directions = [generator.choice([-1.0, 1.0], gradient.shape) / np.sqrt(gradient.size)]
        if norm > 0.0:
            directions.append(gradient / norm)
        found = [_compare(session, feeds, name, gradient, direction) for direction in directions]
        checks.append(max(found, key=lambda check: check.error))
    return checks


def _compare(
    session: onnxruntime.InferenceSession, feeds: dict[str, Array], name: str, gradient: Array, direction: Array
) -> GradientCheck:
    slope = float((gradient * direction).sum())
    value = feeds[name]
    size = max(float(np.linalg.norm(value)), 0.1)
    norm = float(np.linalg.norm(gradient))
    best = (np.inf, 0.0)
    for relative in STEP_SIZES:
        step = relative * size
        losses = []
        for sign in (1.0, -1.0):
            moved = feeds | {name: (value + sign * step * direction).astype(np.float32)}
            losses.append(float(session.run([LOSS], moved)[0]))
        difference = (losses[0] - losses[1]) / (2 * step)
        # What float32 losses cannot tell apart counts as nothing.
        noise = 4e-7 * (abs(losses[0]) + abs(losses[1])) / (2 * step)
        error = max(0.0, abs(difference - slope) - noise) / max(norm, abs(difference), noise)
        best = min(best, (error, difference))
    return GradientCheck(name, slope, best[1], best[0], best[0] <= TOLERANCE)


def _session(model: bytes) -> onnxruntime.InferenceSession:
    """Open the graph with every dropout's ratio at 0."""
    proto = onnx.load_model_from_string(model)
    ratios = {node.input[1] for node in proto.graph.node if node.op_type == "Dropout" and len(node.input) > 1}
    for entry in proto.graph.initializer:
        if entry.name in ratios:
            entry.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(entry)), entry.name))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:
        raise GraphError(f"onnxruntime cannot load the graph: {error}") from error


def _limit_targets(proto: onnx.ModelProto, feeds: dict[str, Array]) -> None:
    """Make an autoencoder's target its input."""
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    if metadata.get("edgeasync.target") == "input":
        (name,) = [
            entry.name
            for entry in proto.graph.input
            if entry.name != "target" and feeds[entry.name].shape == feeds["target"].shape
        ][:1]
        feeds["target"] = feeds[name]
