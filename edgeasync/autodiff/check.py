"""Holding a training graph's gradients against differences of its loss."""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgeasync.autodiff import forward
from edgeasync.autodiff.graph import Array, free_inputs, needed, read_nodes, write_nodes
from edgeasync.autodiff.inspection import example_feeds, measure
from edgeasync.autodiff.losses import TARGET
from edgeasync.errors import GraphError
from edgeasync.parameters import ParameterSpec, Vector

TOLERANCE = 0.02
"""How far a gradient may be from the difference, as a share: float32 and bends in the loss allow no better."""

STEP_SIZES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
"""Differences are taken over several steps, relative to the parameter's size; the nearest one counts."""

PARTS_MIN, PARTS_MAX = 4, 128
"""Into how many parts a parameter's values are dealt out, each of which is checked by itself."""

OPERATIONS_MAX = 1e10
"""What dealing out may cost, about, in operations of the forward model."""

MOVED = 0.05
"""How far from their first values parameters are checked, as a share: a bias of 0 may lie on a bend."""

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
    """Compare gradients with central differences of the loss, for each trained parameter in many directions.

    The first direction is the gradient itself. For the others the values are dealt out at random, to parts as
    small as the cost allows, and every part moves by random signs, which weighs all its values alike: a single
    wrong value shows, unless it is small among those of its part. The worst of all is returned. Dropout is off
    meanwhile. The examples are random. Raises `GraphError` if no loss is finite.
    """
    proto = _without_dropout(onnx.load_model_from_string(model))
    alone = _loss_alone(proto)
    session = forward.open_session(alone.SerializeToString())

    def loss(feeds: Mapping[str, Array]) -> float:
        return float(session.run([LOSS], feeds)[0])

    feeds = _finite_feeds(proto, spec, initial, loss, batch_size=batch_size, seed=seed)
    trained = [parameter.name for parameter in spec.parameters if parameter.role == "trained"]
    names = [f"{name}.grad" for name in trained]
    gradients = forward.open_session(proto.SerializeToString()).run(names, feeds)
    parts = int(OPERATIONS_MAX / (2 * measure(alone, feeds).operations * len(trained) + 1))
    generator = np.random.Generator(np.random.PCG64(seed))
    checks = []
    for name, found in zip(trained, gradients, strict=True):
        gradient = found.astype(np.float64)
        directions = _directions(gradient, min(max(parts, PARTS_MIN), PARTS_MAX), generator)
        compared = [_compare(loss, feeds, name, gradient, direction) for direction in directions]
        checks.append(max(compared, key=lambda check: check.error))
    return checks


def _directions(gradient: Array, parts: int, generator: np.random.Generator) -> Iterator[Array]:
    if norm := float(np.linalg.norm(gradient)):
        yield gradient / norm
    for part in np.array_split(generator.permutation(gradient.size), min(parts, gradient.size)):
        direction = np.zeros(gradient.size)
        direction[part] = generator.choice([-1.0, 1.0], len(part)) / np.sqrt(len(part))
        yield direction.reshape(gradient.shape)


def _compare(
    loss: Callable[[Mapping[str, Array]], float],
    feeds: Mapping[str, Array],
    name: str,
    gradient: Array,
    direction: Array,
) -> GradientCheck:
    slope = float((gradient * direction).sum())
    value = feeds[name]
    size = max(float(np.linalg.norm(value)), 0.1)
    # What a slope along such a direction amounts to; this one may be small because its parts cancel.
    usual = float(np.linalg.norm(gradient * direction))
    error, best = np.inf, 0.0
    for relative in STEP_SIZES:
        step = relative * size
        ahead, behind = [
            loss({**feeds, name: (value + sign * step * direction).astype(np.float32)}) for sign in (1.0, -1.0)
        ]
        difference = (ahead - behind) / (2 * step)
        # What float32 losses cannot tell apart counts as nothing.
        noise = 4e-7 * (abs(ahead) + abs(behind)) / (2 * step)
        apart = max(0.0, abs(difference - slope) - noise) / max(usual, abs(slope), abs(difference), noise)
        if apart < error:
            error, best = apart, difference
        if error <= TOLERANCE:
            break
    return GradientCheck(name, slope, best, error, error <= TOLERANCE)


def _finite_feeds(
    proto: onnx.ModelProto,
    spec: ParameterSpec,
    initial: Vector,
    loss: Callable[[Mapping[str, Array]], float],
    *,
    batch_size: int,
    seed: int,
) -> dict[str, Array]:
    """Return random examples and moved parameters; the first ones, or positive examples, if the loss needs it."""
    examples = example_feeds(proto, spec, batch_size, seed)
    generator = np.random.Generator(np.random.PCG64(seed))
    first, moved = spec.views(initial), spec.views(initial.copy())
    for parameter in spec.parameters:
        if parameter.role == "trained":
            value = moved[parameter.name]
            size = MOVED * max(float(np.sqrt(np.mean(value**2))), 0.1)
            value += (size * generator.standard_normal(value.shape)).astype(np.float32)
    positive = {name: np.abs(value) for name, value in examples.items()}
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    for drawn, values in ((examples, moved), (examples, first), (positive, moved), (positive, first)):
        feeds = drawn | values
        if metadata.get("edgeasync.target") == "input":
            feeds[TARGET] = next(value for name, value in feeds.items() if name not in {*values, TARGET})
        if np.isfinite(loss(feeds)):
            return feeds
    raise GraphError("the loss of random examples is not finite at the model's values; are those in order?")


def _without_dropout(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Give every dropout a ratio of 0; it is a constant of its own."""
    ratios = {node.input[1] for node in proto.graph.node if node.op_type == "Dropout"}
    for entry in proto.graph.initializer:
        if entry.name in ratios:
            entry.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), entry.name))
    return proto


def _loss_alone(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph without gradients, metrics and moving statistics."""
    nodes = needed(read_nodes(proto.graph.node), [LOSS])
    used = {name for node in nodes for name in free_inputs(node)}
    alone = onnx.ModelProto()
    alone.CopyFrom(proto)
    for field, kept in (
        (alone.graph.node, write_nodes(nodes, {})),
        (alone.graph.output, [entry for entry in proto.graph.output if entry.name == LOSS]),
        (alone.graph.initializer, [entry for entry in proto.graph.initializer if entry.name in used]),
    ):
        del field[:]
        field.extend(kept)
    return alone
