"""Expansions of normalizations."""

from collections.abc import Sequence

import numpy as np

from edgeasync.autodiff.expansions.registry import ReplacedStep, expands, expands_fused
from edgeasync.autodiff.rules.reduction import count_of


def _divided_by_rms(step: ReplacedStep, x: str, axes: Sequence[int], scale: str) -> str:
    """Divide by the root of the mean square (Zhang and Sennrich 2019, arXiv:1910.07467), and scale."""
    graph, op = step.graph, step.graph.op
    default = 1e-12 if step.node.domain else 1e-5
    mean = op("ReduceMean", op("Mul", x, x), graph.ints(*axes), keepdims=1)
    root = op("Sqrt", op("Add", mean, graph.scalar(step.attribute("epsilon", default))))
    return op("Mul", op("Div", x, root), scale)


@expands("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_normalization(step: ReplacedStep) -> Sequence[str]:
    axes = range(step.axis(), step.rank(0))
    return [_divided_by_rms(step, step.input(0), axes, step.input(1))]


@expands("GroupNormalization")
def _group_normalization(step: ReplacedStep) -> Sequence[str]:
    """Normalize groups of channels (Wu and He 2018, arXiv:1803.08494).

    Scale and bias are per channel, as from opset 21 on. onnx accepts no older opset.
    """
    graph, op = step.graph, step.graph.op
    channels, groups = step.fixed(0, 1), int(step.attribute("num_groups", 0))
    one, zero = (graph.constant(np.full(groups, value, np.float32)) for value in (1.0, 0.0))
    apart = op("Reshape", step.input(0), graph.ints(0, groups, -1))
    normal = op("InstanceNormalization", apart, one, zero, epsilon=step.attribute("epsilon", 1e-5))
    normal = op("Reshape", normal, graph.ints(0, channels, -1))
    scale, bias = (op("Unsqueeze", step.input(position), graph.ints(1)) for position in (1, 2))
    return [graph.reshape_like(op("Add", op("Mul", normal, scale), bias), step.input(0))]


@expands("MeanVarianceNormalization")
def _mean_variance_normalization(step: ReplacedStep) -> Sequence[str]:
    """Subtract the mean and divide by the standard deviation.

    The deviation is computed as a norm, whose gradient is 0 where all values are equal.
    """
    graph, op, x = step.graph, step.graph.op, step.input(0)
    axes = [int(axis) % step.rank(0) for axis in step.attribute("axes", [0, 2, 3])]
    centred = op("Sub", x, op("ReduceMean", x, graph.ints(*axes), keepdims=1))
    norm = op("ReduceL2", centred, graph.ints(*axes), keepdims=1)
    deviation = op("Div", norm, op("Sqrt", count_of(step, step.shape(0), axes)))
    return [op("Div", centred, op("Add", deviation, graph.scalar(1e-9)))]


@expands_fused("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_normalization(step: ReplacedStep) -> Sequence[str | None]:
    """Normalize the sum of a layer's input, its output and, optionally, its bias."""
    simplified = step.node.op == "SkipSimplifiedLayerNormalization"
    bias = step.input(3 if simplified else 4)
    op, total = step.graph.op, step.graph.op("Add", step.input(0), step.input(1))
    if bias:
        total = op("Add", total, bias)
    if simplified:
        normal = _divided_by_rms(step, total, [step.rank(0) - 1], step.input(2))
    else:
        normal = _layer_norm(step, total, step.input(2), step.input(3))
    return [normal, None, None, total]


@expands_fused("EmbedLayerNormalization")
def _embedding(step: ReplacedStep) -> Sequence[str | None]:
    """Normalize the sum of the embeddings of words, positions and segments, as BERT does.

    The second output counts the words of each example that are not padding.
    """
    graph, op = step.graph, step.graph.op
    words, segments, mask, positions = [step.input(position) for position in (0, 1, 7, 8)]
    if positions:
        places = op("Gather", step.input(3), positions)
    else:
        places = op("Slice", step.input(3), graph.ints(0), graph.ints(step.fixed(0, 1)), graph.ints(0))
    total = op("Add", op("Gather", step.input(2), words), places)
    if segments:
        total = op("Add", total, op("Gather", step.input(4), segments))
    normal = _layer_norm(step, total, step.input(5), step.input(6))
    count = None
    if mask:
        one = graph.constant(np.array(1, graph.dtypes[mask]))
        count = op("ReduceSum", op("Cast", op("Equal", mask, one), to=6), graph.ints(1), keepdims=0)
    return [normal, count, total]


def _layer_norm(step: ReplacedStep, x: str, scale: str, bias: str) -> str:
    given = [x, scale, bias] if bias else [x, scale]
    return step.graph.op("LayerNormalization", *given, axis=-1, epsilon=step.attribute("epsilon", 1e-12))
