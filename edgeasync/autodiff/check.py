"""Compares a training graph's gradients with finite differences of its loss."""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx

from edgeasync.autodiff.chance import without_chance
from edgeasync.autodiff.graph import Array, free_inputs, needed, read_nodes, refill, value_info, write_nodes
from edgeasync.autodiff.inspection import count_operations, example_feeds
from edgeasync.autodiff.losses import TARGET
from edgeasync.autodiff.probing import open_session
from edgeasync.errors import GraphError
from edgeasync.parameters import ParameterSpec, Vector

TOLERANCE, TOLERANCE_IN_PART = 0.02, 0.06
"""Maximum relative difference between the gradient and finite differences.

The difference is not exactly 0, because float32 values are rounded and the loss may have kinks.

The second value applies to directions along which only part of a parameter changes, because a
single kink has more influence there.
"""

STEP_SIZES = tuple([0.03 / 3**place for place in range(6)])
"""Step sizes of the finite differences, relative to the parameter's norm. They are tried in this
order until two results agree.
"""

AGREED = 0.01
"""Relative deviation up to which two finite differences agree. A larger deviation indicates a kink
within the step.
"""

POINTS = 6
"""Number of points at which a gradient must be wrong to fail the check along one direction. A
single point may be near a kink.
"""

PARTS_MIN, PARTS_MAX = 4, 128
"""Minimum and maximum number of parts into which a parameter is divided. Each part is checked
separately.
"""

OPERATIONS_MAX = 2e10
"""Approximate budget for all these checks, in arithmetic operations of the forward model."""

NOISE = 3e-7
"""Relative rounding error of a loss that is computed in float32."""

MOVED = 0.05
"""Relative distance of the checked points from the initial values. An initial value, such as a bias
of 0, may be at a kink.
"""

LOSS = "loss"


class GradientCheck(msgspec.Struct, frozen=True):
    """The result of checking one parameter along one direction.

    `slope` is the directional derivative of the loss computed from the gradient. `difference` is
    the same derivative computed by finite differences. If both values are 0, the check proves
    nothing, and `compared` is False.
    """

    name: str
    slope: float
    difference: float
    error: float
    passed: bool
    compared: bool = True


def check_gradients(
    model: bytes, spec: ParameterSpec, initial: Vector, *, batch_size: int = 8, seed: int = 0
) -> list[GradientCheck]:
    """Compare the gradient of each trained parameter with central differences of the loss.

    A parameter is checked along several directions. The first one is the gradient itself. For the
    others, the parameter's values are randomly divided into parts, which are as small as the budget
    allows. Along each direction, the values of one part change by the same amount with random
    signs. So a single wrong value in the gradient is detected, unless it is small compared with its
    part.

    Returns one result per parameter: that of a failed check if there is one, or else of the first
    check. Dropout is disabled, and random numbers are fixed. Tensors at which gradients stop are
    held constant. Examples are random, and are drawn again if a gradient is 0. Raises `GraphError`
    if the loss is not finite at any point.
    """
    scene = _Scene(model, spec, initial, batch_size, seed)
    trained = [parameter.name for parameter in spec.parameters if parameter.role == "trained"]
    parts = int(OPERATIONS_MAX / (2 * scene.operations * len(trained) + 1))
    generator = np.random.Generator(np.random.PCG64(seed))
    checks = []
    for name in trained:
        begin = scene.first_that_moves(name)
        gradient = scene.point(begin).gradients[f"{name}.grad"]
        if not np.isfinite(gradient).all():
            checks.append(GradientCheck(name, np.nan, 0.0, np.inf, passed=False))
            continue
        directions = _directions(gradient, parts, generator)
        found = []
        for direction in directions:
            found.append(scene.check(name, direction, begin))
            if not found[-1].passed:
                break
        told = found[0] if found[-1].passed else found[-1]
        checks.append(msgspec.structs.replace(told, compared=any(each.slope or each.difference for each in found)))
    return checks


def _directions(gradient: Array, parts: int, generator: np.random.Generator) -> Iterator[Array]:
    if norm := float(np.linalg.norm(gradient)):
        yield gradient / norm
    parts = min(max(parts, PARTS_MIN), PARTS_MAX, gradient.size)
    for part in np.array_split(generator.permutation(gradient.size), parts):
        direction = np.zeros(gradient.size)
        direction[part] = generator.choice([-1.0, 1.0], len(part)) / np.sqrt(len(part))
        yield direction.reshape(gradient.shape)


class _Point(msgspec.Struct, frozen=True):
    """A point at which the gradient is checked.

    `feeds` contains the inputs, the parameters, and the tensors at which gradients stop, by name.
    `gradients` contains the gradients at this point.
    """

    feeds: dict[str, Array]
    gradients: dict[str, Array]


class _Scene:
    """A deterministic training graph, and the points at which it is evaluated."""

    def __init__(self, model: bytes, spec: ParameterSpec, initial: Vector, batch_size: int, seed: int) -> None:
        self._proto = onnx.load_model_from_string(without_chance(model))
        self._spec, self._initial, self._batch_size, self._seed = spec, initial, batch_size, seed
        self._gradients = [entry.name for entry in self._proto.graph.output if entry.name.endswith(".grad")]
        self._stops = _stops(self._proto)
        self._proto.graph.output.extend([onnx.ValueInfoProto(name=name) for name in self._stops])
        self._whole = open_session(self._proto.SerializeToString())
        self._points: list[_Point] = []
        feeds = self.point(0).feeds
        alone = _loss_alone(self._proto, {name: feeds[name] for name in self._stops})
        self._forward = open_session(alone.SerializeToString())
        self._read = {entry.name for entry in alone.graph.input}
        self.operations = count_operations(alone, self._those_read(feeds))

    def point(self, number: int) -> _Point:
        """Return the random point with this number, which is always the same."""
        while number >= len(self._points):
            feeds = self._finite_feeds(len(self._points))
            gradients = [value.astype(np.float64) for value in self._whole.run(self._gradients, feeds)]
            if self._stops:
                feeds |= zip(self._stops, self._whole.run(self._stops, feeds), strict=True)
            self._points.append(_Point(feeds, dict(zip(self._gradients, gradients, strict=True))))
        return self._points[number]

    def first_that_moves(self, name: str) -> int:
        """Return the number of the first point at which the parameter has a gradient that is not 0.

        Return 0 if there is no such point.
        """
        moving = (number for number in range(POINTS) if self.point(number).gradients[f"{name}.grad"].any())
        return next(moving, 0)

    def check(self, name: str, direction: Array, begin: int) -> GradientCheck:
        """Check a parameter along a direction at several points, starting with point `begin`.

        Return the result with the smallest error.
        """
        best = GradientCheck(name, 0.0, 0.0, np.inf, passed=False)
        tolerance = TOLERANCE if direction.all() else TOLERANCE_IN_PART
        for number in range(POINTS):
            check = self._compare(name, direction, tolerance, self.point((begin + number) % POINTS))
            if check.error <= best.error:
                best = check
            if best.passed:
                break
        return best

    def _compare(self, name: str, direction: Array, tolerance: float, point: _Point) -> GradientCheck:
        """Compare the gradient with the extrapolated limit of two similar finite differences."""
        gradient = point.gradients[f"{name}.grad"]
        slope = float((gradient * direction).sum())
        # The usual size of a derivative of this parameter. `slope` itself may be small because its
        # terms cancel.
        usual = max(float(np.sqrt(np.mean(gradient**2))), abs(slope))
        size = max(float(np.linalg.norm(point.feeds[name])), 0.1)
        limit, spread, noise = 0.0, np.inf, 0.0
        before, _ = self._difference(name, direction, STEP_SIZES[0] * size, point)
        for step in STEP_SIZES[1:]:
            now, open_ = self._difference(name, direction, step * size, point)
            scale = max(usual, abs(now))
            if np.isfinite(spread) and open_ > TOLERANCE * scale:
                break  # smaller steps are even less accurate
            if abs(now - before) < spread:
                # Richardson 1911: the error falls with the square of the step size, here by a
                # factor of 9.
                limit, spread, noise = now + (now - before) / 8, abs(now - before), open_
            if spread <= AGREED * scale + noise:
                break
            before = now
        if not np.isfinite([slope, spread]).all():
            return GradientCheck(name, slope, limit, np.inf, passed=False)
        # If `slope` and `limit` are both 0, for example because the loss ignores the parameter, the
        # error is 0.
        error = max(0.0, abs(limit - slope) - noise - spread) / (max(usual, abs(limit), noise) or 1.0)
        return GradientCheck(name, slope, limit, error, error <= tolerance)

    def _difference(self, name: str, direction: Array, step: float, point: _Point) -> tuple[float, float]:
        """Return a finite difference of the loss along a direction, and its rounding error."""
        value = point.feeds[name]
        ahead, behind = [
            self._loss({**point.feeds, name: (value + sign * step * direction).astype(np.float32)})
            for sign in (1.0, -1.0)
        ]
        return (ahead - behind) / (2 * step), NOISE * (abs(ahead) + abs(behind)) / (2 * step)

    def _loss(self, feeds: Mapping[str, Array]) -> float:
        return float(self._forward.run([LOSS], self._those_read(feeds))[0])

    def _those_read(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: value for name, value in feeds.items() if name in self._read}

    def _finite_feeds(self, number: int) -> dict[str, Array]:
        """Return random inputs and shifted parameters.

        If the loss is not finite for them, use positive inputs, unshifted parameters, or both.
        """
        examples = example_feeds(self._proto, self._spec, self._batch_size, self._seed + number)
        generator = np.random.Generator(np.random.PCG64([self._seed, number]))
        first, moved = self._spec.views(self._initial), self._spec.views(self._initial.copy())
        for parameter in self._spec.parameters:
            if parameter.role == "trained":
                value = moved[parameter.name]
                size = MOVED * max(float(np.sqrt(np.mean(value**2))), 0.1)
                value += (size * generator.standard_normal(value.shape)).astype(np.float32)
        positive = {name: np.abs(value) for name, value in examples.items()}
        for drawn, values in ((examples, moved), (examples, first), (positive, moved), (positive, first)):
            feeds = drawn | values
            if _is_autoencoder(self._proto):
                feeds[TARGET] = next(value for name, value in feeds.items() if name not in {*values, TARGET})
            if np.isfinite(self._whole.run([LOSS], feeds)[0]):
                return feeds
        raise GraphError(
            "the loss of random examples is not finite for the initial values; check the initial values"
        )


def _is_autoencoder(proto: onnx.ModelProto) -> bool:
    return any((entry.key, entry.value) == ("edgeasync.target", "input") for entry in proto.metadata_props)


def _stops(proto: onnx.ModelProto) -> list[str]:
    """Return the names of tensors at which gradients stop, which are outputs of Identity nodes.

    An Identity node whose output is an output of the graph does not count.
    """
    results = {entry.name for entry in proto.graph.output}
    nodes = needed(read_nodes(proto.graph.node), [LOSS])
    return [node.outputs[0] for node in nodes if node.op == "Identity" and node.outputs[0] not in results]


def _loss_alone(proto: onnx.ModelProto, held: Mapping[str, Array]) -> onnx.ModelProto:
    """Return the part of the graph that computes the loss, with the tensors in `held` as inputs."""
    nodes = [node for node in read_nodes(proto.graph.node) if held.keys().isdisjoint(node.outputs)]
    nodes = needed(nodes, [LOSS])
    used = {name for node in nodes for name in free_inputs(node)}
    inputs = [*proto.graph.input, *[value_info(name, value.dtype, value.shape) for name, value in held.items()]]
    alone = onnx.ModelProto()
    alone.CopyFrom(proto)
    for field, kept in (
        (alone.graph.input, [entry for entry in inputs if entry.name in used]),
        (alone.graph.node, write_nodes(nodes, {})),
        (alone.graph.output, [entry for entry in proto.graph.output if entry.name == LOSS]),
        (alone.graph.initializer, [entry for entry in proto.graph.initializer if entry.name in used]),
    ):
        refill(field, kept)
    return alone
