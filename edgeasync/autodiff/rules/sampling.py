"""The gradient of spatial transformers (Jaderberg et al. 2015): images sampled at computed places."""

import msgspec

from edgeasync.autodiff.rules.registry import Gradients, Step, rule


class _Axis(msgspec.Struct, frozen=True):
    """Coordinates along one axis of the image. All tensors have the shape (batch, 1, places).

    Each place lies between two pixels, `low` and the next one.
    """

    pixels: tuple[str, str]
    """Indices of both pixels, as floats. Indices outside the image are clipped."""
    weights: tuple[str, str]
    """Shares of both pixels in the result, 0 outside the image."""
    slopes: tuple[str, str]
    """Derivatives of the shares by the coordinate in the grid."""


@rule("GridSample")
def _grid_sample(step: Step) -> Gradients:
    """Gradients of linear interpolation between the four pixels around each place."""
    graph, op, shape = step.graph, step.graph.op, step.shape(0)
    mode, padding = step.attribute("mode", "linear"), step.attribute("padding_mode", "zeros")
    if mode not in ("bilinear", "linear") or padding not in ("zeros", "border") or len(shape) != 4:
        raise step.refused(
            f"its mode is {mode} with {padding} padding in {len(shape) - 2} dimensions; use bilinear sampling of "
            "images with zeros or border padding"
        )
    if None in (*shape[1:], *step.shape(1)[1:]):
        raise step.refused("the size of its image or grid depends on the batch size")
    channels, rows, columns = [dim or 0 for dim in shape[1:]]
    places = [dim or 0 for dim in step.shape(1)[1:3]]
    count = places[0] * places[1]
    x, y = [
        _axis(step, op("Reshape", part, graph.ints(-1, 1, count)), size)
        for part, size in zip(graph.add("Split", step.input(1), outputs=2, axis=3, num_outputs=2),
                              (columns, rows), strict=True)
    ]  # fmt: skip
    corners = [(row, column) for row in (0, 1) for column in (0, 1)]
    width = graph.scalar(columns)
    indices = [op("Add", op("Mul", y.pixels[row], width), x.pixels[column]) for row, column in corners]
    pixels = op("Cast", op("Concat", *indices, axis=2), to=7)
    gradient = op("Reshape", step.gradient, graph.ints(-1, channels, count))
    repeated = op("Concat", *[gradient] * 4, axis=2)
    pixels = op("Expand", pixels, op("Shape", repeated))
    weights = op("Concat", *[op("Mul", y.weights[row], x.weights[column]) for row, column in corners], axis=2)
    flat = op("Reshape", step.input(0), graph.ints(-1, channels, rows * columns))
    zeros = op("ConstantOfShape", op("Shape", flat))
    image = op("ScatterElements", zeros, pixels, op("Mul", repeated, weights), axis=2, reduction="add")
    seen = op("Mul", op("GatherElements", flat, pixels, axis=2), repeated)
    parts = graph.add("Split", op("ReduceSum", seen, graph.ints(1)), outputs=4, axis=2, num_outputs=4)
    sloped = [
        graph.total([op("Mul", part, op("Mul", upright.weights[row], across.slopes[column]))
                     for part, (row, column) in zip(parts, turned, strict=True)])
        for upright, across, turned in ((y, x, corners), (x, y, [(column, row) for row, column in corners]))
    ]  # fmt: skip
    grid = op("Concat", *[op("Reshape", part, graph.ints(-1, *places, 1)) for part in sloped], axis=3)
    return [graph.reshape_like(image, step.input(0)), grid]


def _axis(step: Step, place: str, size: int) -> _Axis:
    """Compute the pixels around each place in the same order of operations as torch and onnxruntime."""
    graph, op = step.graph, step.graph.op
    one, last, two = graph.scalar(1.0), graph.scalar(size - 1), graph.scalar(2.0)
    moved = op("Add", place, one)
    if step.attribute("align_corners", 0):
        at, scale = op("Mul", op("Div", moved, two), last), (size - 1) / 2
    else:
        at, scale = op("Div", op("Sub", op("Mul", moved, graph.scalar(size)), one), two), size / 2
    slope = graph.scalar(scale)
    if step.attribute("padding_mode", "zeros") == "border":
        inside = op("And", op("Greater", at, graph.scalar(0.0)), op("Less", at, last))
        slope = op("Mul", op("Cast", inside, to=1), slope)
        at = op("Clip", at, graph.scalar(0.0), last)
    low = op("Floor", at)
    share = op("Sub", at, low)
    pixels, weights, slopes = [], [], []
    for pixel, weight, sign in ((low, op("Sub", one, share), -1.0), (op("Add", low, one), share, 1.0)):
        clipped = op("Clip", pixel, graph.scalar(0.0), last)
        valid = op("Cast", op("Equal", pixel, clipped), to=1)
        pixels.append(clipped)
        weights.append(op("Mul", weight, valid))
        slopes.append(op("Mul", op("Mul", valid, graph.scalar(sign)), slope))
    return _Axis(*[(low, high) for low, high in (pixels, weights, slopes)])
