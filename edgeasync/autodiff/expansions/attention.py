"""Expansions of attention (Vaswani et al. 2017, arXiv:1706.03762) and of rotary embeddings."""

import math
from collections.abc import Sequence

import numpy as np

from edgeasync.autodiff.expansions.registry import ReplacedStep, expands, expands_fused

LOWEST = float(np.finfo(np.float32).min)
"""The number that onnxruntime adds to the score of a key that is hidden from a query."""


def _scores(step: ReplacedStep, query: str, key: str, size: int) -> str:
    """Return the scaled products of queries and keys, both of (batch, heads, positions, size)."""
    op, scale = step.graph.op, step.attribute("scale", 0.0) or 1 / math.sqrt(size)
    return op("MatMul", op("Mul", query, step.graph.scalar(scale)), op("Transpose", key, perm=[0, 1, 3, 2]))


def _split_heads(step: ReplacedStep, value: str, heads: int) -> str:
    """Change the axes (batch, positions, features) to (batch, heads, positions, size of a head)."""
    graph, op = step.graph, step.graph.op
    return op("Transpose", op("Reshape", value, graph.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _join_heads(step: ReplacedStep, value: str) -> str:
    graph, op = step.graph, step.graph.op
    return op("Reshape", op("Transpose", value, perm=[0, 2, 1, 3]), graph.ints(0, 0, -1))


# -- of the standard -------------------------------------------------------------------------------------------


@expands("Attention")
def _attention(step: ReplacedStep) -> Sequence[str | None]:
    """Expand attention over several heads. Groups of heads may share their keys and values."""
    step.refuse_inputs({4: "past keys", 5: "past values", 6: "lengths of padded keys"})
    graph, op, wide = step.graph, step.graph.op, step.rank(0) == 4
    tensors, sizes = [step.input(position) for position in range(3)], []
    heads = [int(step.attribute(f"{side}_num_heads", 0)) for side in ("q", "kv", "kv")]
    for position in range(3):
        if wide:
            heads[position] = step.fixed(position, 1)
            sizes.append(step.fixed(position, 3))
        else:
            tensors[position] = _split_heads(step, tensors[position], heads[position])
            sizes.append(step.fixed(position, 2) // heads[position])
    queries, keys = (step.fixed(position, -2) for position in (0, 1))
    if (copies := heads[0] // heads[1]) > 1:
        for position in (1, 2):
            apart = op("Unsqueeze", tensors[position], graph.ints(2))
            apart = op("Expand", apart, graph.ints(1, 1, copies, 1, 1))
            tensors[position] = op("Reshape", apart, graph.ints(0, heads[0], keys, sizes[position]))
    scores = _scores(step, tensors[0], tensors[1], sizes[0])
    if cap := step.attribute("softcap", 0.0):
        scores = op("Mul", op("Tanh", op("Div", scores, graph.scalar(cap))), graph.scalar(cap))
    weights = _weights(step, scores, queries, keys)
    result = op("MatMul", weights, tensors[2])
    return [result if wide else _join_heads(step, result)]


def _weights(step: ReplacedStep, scores: str, queries: int, keys: int) -> str:
    """Return the softmax of scores over the keys that a query sees. If it sees none, return 0.

    A key is hidden by a boolean mask that is false, by a float mask that is -inf or the lowest
    float32, as in onnxruntime, or by `is_causal`.
    """
    graph, op, mask, seen = step.graph, step.graph.op, step.input(3), ""
    if mask and step.shape(3)[-1] != keys:  # opset 24 pads it
        raise step.refused(f"the last axis of its mask {mask!r} has not the size {keys}; export it with that size")
    if mask and graph.dtypes[mask].kind == "b":
        seen = mask
    elif mask:
        scores = op("Add", scores, mask)
        seen = op("Greater", mask, graph.scalar(LOWEST))
    if step.attribute("is_causal", 0):
        before = graph.constant(np.tri(queries, keys, dtype=np.bool_))
        seen = op("And", seen, before) if seen else before
    if not seen:
        return op("Softmax", scores, axis=-1)
    if not mask:  # all queries see the first key
        return op("Softmax", op("Where", seen, scores, graph.scalar(-np.inf)), axis=-1)
    # A softmax of -inf only would be NaN.
    some = op("ReduceMax", op("Cast", seen, to=1), graph.ints(-1), keepdims=1)
    hidden = op("Where", op("Greater", some, graph.scalar(0.0)), graph.scalar(-np.inf), graph.scalar(0.0))
    weights = op("Softmax", op("Where", seen, scores, hidden), axis=-1)
    return op("Where", seen, weights, graph.scalar(0.0))


@expands("RotaryEmbedding")
def _rotary_embedding(step: ReplacedStep) -> Sequence[str]:
    """Rotate pairs of features by angles that depend on the position (arXiv:2104.09864)."""
    graph, op, wide = step.graph, step.graph.op, step.rank(0) == 4
    x = step.input(0)
    if wide:
        size = step.fixed(0, 3)
    else:
        heads = int(step.attribute("num_heads", 0))
        size = step.fixed(0, 2) // heads
        x = op("Reshape", x, graph.ints(0, 0, heads, size))
    turned = int(step.attribute("rotary_embedding_dim", 0)) or size
    rest = []
    if turned < size:
        x, *rest = graph.add("Split", x, graph.ints(turned, size - turned), outputs=2, axis=-1)
    first, second = _pairs(step, x, turned)
    cos, sin = [_angles(step, position, 1 if wide else 2) for position in (1, 2)]
    real = op("Sub", op("Mul", first, cos), op("Mul", second, sin))
    imaginary = op("Add", op("Mul", first, sin), op("Mul", second, cos))
    if step.attribute("interleaved", 0):
        pairs = [op("Unsqueeze", part, graph.ints(4)) for part in (real, imaginary)]
        result = op("Reshape", op("Concat", *pairs, axis=-1), graph.ints(0, 0, 0, turned))
    else:
        result = op("Concat", real, imaginary, axis=-1)
    if rest:
        result = op("Concat", result, *rest, axis=-1)
    return [result if wide else op("Reshape", result, graph.ints(0, 0, -1))]


def _pairs(step: ReplacedStep, x: str, size: int) -> list[str]:
    """Return the first and the second features of all pairs."""
    graph = step.graph
    if not step.attribute("interleaved", 0):
        return graph.add("Split", x, graph.ints(size // 2, size // 2), outputs=2, axis=-1)
    apart = graph.op("Reshape", x, graph.ints(0, 0, 0, size // 2, 2))
    return [
        graph.op("Squeeze", half, graph.ints(4))
        for half in graph.add("Split", apart, graph.ints(1, 1), outputs=2, axis=-1)
    ]


def _angles(step: ReplacedStep, position: int, heads_axis: int) -> str:
    """Return the cosines or sines, with an axis of size 1 for the heads."""
    graph, values = step.graph, step.input(position)
    if step.input(3):
        values = graph.op("Gather", values, step.input(3))
    return graph.op("Unsqueeze", values, graph.ints(heads_axis))


# -- of onnxruntime's optimizer --------------------------------------------------------------------------------


@expands_fused("Attention")
def _fused_attention(step: ReplacedStep) -> Sequence[str | None]:
    """Project the input to queries, keys and values by one matrix, and attend."""
    step.refuse_inputs({4: "past keys and values", 6: "the length of the past"})
    if step.attribute("do_rotary", 0):
        raise step.refused("do_rotary=1 is not supported; use the original file, before onnxruntime optimized it")
    graph, op = step.graph, step.graph.op
    third = step.fixed(1, 1) // 3
    sizes = [int(size) for size in step.attribute("qkv_hidden_sizes", [])] or [third] * 3
    projected = op("MatMul", step.input(0), step.input(1))
    if step.input(2):
        projected = op("Add", projected, step.input(2))
    tensors = graph.add("Split", projected, graph.ints(*sizes), outputs=3, axis=-1)
    length = step.fixed(0, 1)
    return [_attend(step, tensors, sizes[0], (length, length), (3, 5))]


@expands_fused("MultiHeadAttention")
def _multi_head_attention(step: ReplacedStep) -> Sequence[str | None]:
    """Add the bias, if there is one, to separate queries, keys and values, and attend."""
    step.refuse_inputs({6: "past keys", 7: "past values", 8: "the length of the past", 9: "beams"})
    graph, op = step.graph, step.graph.op
    if not (step.input(1) and step.input(2)) or any(step.rank(position) != 3 for position in range(3)):
        raise step.refused(
            "it needs query, key and value as tensors of (batch, positions, features); use the original file, "
            "before onnxruntime optimized it"
        )
    tensors = [step.input(position) for position in range(3)]
    sizes = [step.fixed(position, 2) for position in range(3)]
    if step.input(3):
        parts = graph.add("Split", step.input(3), graph.ints(*sizes), outputs=3, axis=0)
        tensors = [op("Add", *pair) for pair in zip(tensors, parts, strict=True)]
    return [_attend(step, tensors, sizes[0], (step.fixed(0, 1), step.fixed(1, 1)), (4, 5))]


def _attend(
    step: ReplacedStep, tensors: Sequence[str], width: int, lengths: tuple[int, int], inputs: tuple[int, int]
) -> str:
    """Return softmax(scale q k' + biases) v, for `tensors` of (batch, positions, features).

    `width` is the number of features of queries and keys, and `lengths` their numbers of positions.
    The biases are a padding mask and a bias at `inputs`, and the attribute `unidirectional`.
    """
    graph, op, heads = step.graph, step.graph.op, int(step.attribute("num_heads", 0))
    query, key, value = (_split_heads(step, tensor, heads) for tensor in tensors)
    scores = _scores(step, query, key, width // heads)
    mask, bias = (step.input(position) for position in inputs)
    if mask:
        scores = op("Add", scores, _padding_bias(step, inputs[0], lengths[1]))
    if bias:
        scores = op("Add", scores, bias)
    if step.attribute("unidirectional", 0):
        later = np.triu(np.full(lengths, LOWEST, np.float32), 1)
        scores = op("Add", scores, graph.constant(later))
    return _join_heads(step, op("MatMul", op("Softmax", scores, axis=-1), value))


def _padding_bias(step: ReplacedStep, position: int, keys: int) -> str:
    """Return a bias that hides padding.

    The mask is positive at the keys to use, of shape (batch, keys) or (batch, queries, keys). Or it
    is the number of keys to use, of shape (batch,).
    """
    graph, op, mask, rank = step.graph, step.graph.op, step.input(position), step.rank(position)
    kind = graph.dtypes[mask]
    if rank > 3 or (rank == 1 and step.shape(position)[0] != step.shape(0)[0]):
        raise step.refused(
            f"the shape of its mask is {step.shape(position)}; use the original file, before onnxruntime "
            "optimized it"
        )
    if rank == 1:
        places = graph.constant(np.arange(keys, dtype=kind))
        kept = op("Less", places, op("Unsqueeze", mask, graph.ints(1)))
    else:
        kept = op("Greater", mask, graph.constant(np.array(0, kind)))
    hidden = graph.scalar(step.attribute("mask_filter_value", -10000.0))
    bias = op("Where", kept, graph.scalar(0.0), hidden)
    return op("Unsqueeze", bias, graph.ints(*([1] if rank == 3 else [1, 2])))
