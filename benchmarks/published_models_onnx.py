"""Runs an ONNX file in torch, whose autograd is the oracle for models without a torch module."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from edgeasync.autodiff import published
from edgeasync.autodiff.reading import stops_gradient

Values = dict[str, Tensor]

Apply = Callable[[onnx.NodeProto, Mapping[str, Any], Sequence[Tensor | None]], Any]
"""Computes an operator from its node, attributes and inputs."""


def compute(node: onnx.NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Tensor | None]) -> Any:
    """Compute an operator. Raises `KeyError` for an unknown one."""
    return OPERATORS[node.op_type](attributes, *inputs)


def run(
    model: onnx.ModelProto, values: Mapping[str, Tensor], live: set[str], output: str, apply: Apply = compute
) -> Tensor:
    """Compute a tensor of a model from its inputs and parameters.

    Constants are converted to the type of the floating-point `values`. Batch norms whose statistics
    are in `live` use those of the batch. `apply` computes all other operators. Raises `KeyError` for
    an unknown operator.
    """
    kind = next(value.dtype for value in values.values() if value.is_floating_point())
    have: Values = {entry.name: _tensor(entry, kind) for entry in model.graph.initializer}
    have |= values
    for node in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Constant":
            if node.output[0] not in values:
                have[node.output[0]] = _constant(attributes, kind)
            continue
        inputs = [have[name] if name else None for name in node.input]
        if node.op_type == "BatchNormalization":
            training = node.input[3] in live
            epsilon = attributes.get("epsilon", 1e-5)
            mean, variance = (None, None) if training else (inputs[3], inputs[4])
            have[node.output[0]] = F.batch_norm(
                inputs[0],
                mean,
                variance,
                inputs[1],
                inputs[2],
                training=training,
                eps=epsilon,
            )
            continue
        made = apply(node, attributes, inputs)
        made = made.detach() if stops_gradient(node) else made
        for name, value in zip(node.output, made if isinstance(made, tuple | list) else [made], strict=False):
            if name and name not in values:
                have[name] = value
        if output in have:
            break
    return have[output]


def parse(data: bytes) -> onnx.ModelProto:
    """Read a file, convert it to a recent opset, and replace branches by their nodes."""
    return published.read(data).model


def _tensor(entry: onnx.TensorProto, kind: torch.dtype) -> Tensor:
    value = torch.from_numpy(np.array(numpy_helper.to_array(entry)))
    return value.to(kind) if value.is_floating_point() else value


def _constant(attributes: Mapping[str, Any], kind: torch.dtype) -> Tensor:
    ((name, value),) = attributes.items()
    if name == "value":
        return _tensor(value, kind)
    made = torch.tensor(value)
    return made.to(kind) if made.is_floating_point() else made


def _ints(value: Tensor | None) -> list[int] | None:
    return None if value is None else [int(each) for each in value.flatten()]


def _pads(attributes: Mapping[str, Any], spatial: int) -> list[int]:
    """Return paddings in torch's order: the last axis first, beginning and end in turn."""
    pads = list(attributes.get("pads", [0] * 2 * spatial))
    return [pads[axis + end * spatial] for axis in reversed(range(spatial)) for end in (0, 1)]


def _same_pads(attributes: Mapping[str, Any], size: list[int], kernel: list[int]) -> dict[str, Any]:
    """Return the attributes with `auto_pad` replaced by explicit paddings."""
    mode = attributes.get("auto_pad", b"NOTSET")
    if mode in (b"NOTSET", b"VALID"):
        return dict(attributes)
    strides = attributes.get("strides", [1] * len(kernel))
    whole = [max(0, (-(-n // s) - 1) * s + k - n) for n, s, k in zip(size, strides, kernel, strict=True)]
    less, more = [total // 2 for total in whole], [total - total // 2 for total in whole]
    pads = less + more if mode == b"SAME_UPPER" else more + less
    return {**attributes, "pads": pads}


def _conv(attributes: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spatial = x.ndim - 2
    attributes = _same_pads(attributes, list(x.shape[2:]), list(weight.shape[2:]))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    strides, dilations = attributes.get("strides", [1] * spatial), attributes.get("dilations", [1] * spatial)
    padded = F.pad(x, _pads(attributes, spatial))
    return convolve(padded, weight, bias, strides, 0, dilations, attributes.get("group", 1))


def _conv_transpose(
    attributes: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    spatial = x.ndim - 2
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    ones, group = [1] * spatial, attributes.get("group", 1)
    strides, dilations = attributes.get("strides", ones), attributes.get("dilations", ones)
    more = attributes.get("output_padding", [0] * spatial)
    made: Tensor = convolve(x, weight, bias, strides, 0, more, group, dilations)
    return F.pad(made, [-size for size in _pads(attributes, spatial)])


def _max_pool(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    kernel, spatial = attributes["kernel_shape"], x.ndim - 2
    attributes = _same_pads(attributes, list(x.shape[2:]), kernel)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial - 1]
    padded = F.pad(x, _pads(attributes, spatial), value=-torch.inf)
    return pool(
        padded, kernel, attributes.get("strides", [1] * spatial), 0, attributes.get("dilations", [1] * spatial),
        ceil_mode=bool(attributes.get("ceil_mode", 0)),
    )  # fmt: skip


def _average_pool(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    kernel, spatial = attributes["kernel_shape"], x.ndim - 2
    attributes = _same_pads(attributes, list(x.shape[2:]), kernel)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[spatial - 1]
    strides, pads = attributes.get("strides", [1] * spatial), _pads(attributes, spatial)
    ceil = bool(attributes.get("ceil_mode", 0))
    made: Tensor = pool(F.pad(x, pads), kernel, strides, 0, ceil)
    if not attributes.get("count_include_pad", 0):
        made = made / pool(F.pad(torch.ones_like(x), pads), kernel, strides, 0, ceil)
    return made


def _gemm(attributes: Mapping[str, Any], a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    made = attributes.get("alpha", 1.0) * (a @ b)
    return made if c is None else made + attributes.get("beta", 1.0) * c


def _reshape(attributes: Mapping[str, Any], x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape) or []
    if not attributes.get("allowzero"):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _slice(
    _: Mapping[str, Any], x: Tensor, starts: Tensor, ends: Tensor,
    axes: Tensor | None = None, steps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    first, last = _ints(starts) or [], _ints(ends) or []
    for place, axis in enumerate(_ints(axes) or range(len(first))):
        step = 1 if steps is None else int(steps.flatten()[place])
        chosen = range(x.shape[axis])[first[place] : last[place] : step]
        x = x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64))
    return x


def _squeeze(_: Mapping[str, Any], x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(_ints(axes) or []))


def _unsqueeze(_: Mapping[str, Any], x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(each % rank for each in _ints(axes) or []):
        x = x.unsqueeze(axis)
    return x


def _gather(attributes: Mapping[str, Any], x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.ndim
    picked = x.index_select(axis, indices.flatten() % x.shape[axis])
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_nd(attributes: Mapping[str, Any], x: Tensor, indices: Tensor) -> Tensor:
    assert not attributes.get("batch_dims", 0)
    return x[indices.unbind(-1)]


def _scatter_nd(attributes: Mapping[str, Any], x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    assert attributes.get("reduction", b"none") == b"none"
    return x.index_put(indices.unbind(-1), updates)


def _range(_: Mapping[str, Any], start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), stop.item(), step.item(), dtype=start.dtype)


def _split(attributes: Mapping[str, Any], x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is None:
        return tuple(x.chunk(attributes["num_outputs"], axis))
    return tuple(x.split(_ints(sizes), axis))


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(attributes: Mapping[str, Any], x: Tensor, axes: Tensor | None = None) -> Tensor:
        which = tuple(_ints(axes) or range(x.ndim))
        return function(x, which, keepdim=bool(attributes.get("keepdims", 1)))

    return reduced


def _cast(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    to = helper.tensor_dtype_to_np_dtype(attributes["to"])
    if to.kind == "f":
        return x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return x.to(torch.from_numpy(np.zeros(1, to)).dtype)


def _pad(
    _: Mapping[str, Any], x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    given, which = _ints(pads) or [], _ints(axes) or list(range(x.ndim))
    both = {axis % x.ndim: (given[at], given[at + len(which)]) for at, axis in enumerate(which)}
    flat = [size for axis in reversed(range(x.ndim)) for size in both.get(axis, (0, 0))]
    return F.pad(x, flat, value=0.0 if value is None else float(value))


def _clip(_: Mapping[str, Any], x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _layer_norm(attributes: Mapping[str, Any], x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[attributes.get("axis", -1) :]
    return F.layer_norm(x, shape, scale, bias, attributes.get("epsilon", 1e-5))


def _constant_of_shape(attributes: Mapping[str, Any], shape: Tensor) -> Tensor:
    value = attributes.get("value")
    filled = torch.zeros(1) if value is None else _tensor(value, torch.get_default_dtype())
    return filled.reshape(()).expand(_ints(shape) or []).clone()


def _lstm(attributes: Mapping[str, Any], x: Tensor, w: Tensor, r: Tensor, *rest: Tensor | None) -> Any:
    """Compute an LSTM with the usual activations, and without sequence lengths and peepholes."""
    b, lengths, h, c = (*rest, None, None, None, None)[:4]
    assert lengths is None
    assert not any(value for name, value in attributes.items() if name not in ("direction", "hidden_size"))
    backward = {b"forward": [False], b"reverse": [True], b"bidirectional": [False, True]}
    directions = backward[attributes.get("direction", b"forward")]
    outputs, last = [], []
    for side, reverse in enumerate(directions):
        zero = x.new_zeros(x.shape[1], r.shape[2])
        hidden, cell = zero if h is None else h[side], zero if c is None else c[side]
        bias = 0 if b is None else sum(b[side].chunk(2))
        steps = []
        for each in reversed(x) if reverse else x:
            i, o, f, g = (each @ w[side].T + hidden @ r[side].T + bias).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            steps.append(hidden)
        outputs.append(torch.stack(steps[::-1] if reverse else steps))
        last.append((hidden, cell))
    hidden, cell = [torch.stack(each) for each in zip(*last, strict=True)]
    return torch.stack(outputs, 1), hidden, cell


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Abs": lambda _, x: x.abs(),
    "Add": lambda _, x, y: x + y,
    "ArgMax": lambda a, x: x.argmax(a.get("axis", 0), bool(a.get("keepdims", 1))),
    "AveragePool": _average_pool,
    "Cast": _cast,
    "CastLike": lambda _, x, like: x.to(like.dtype),
    "Clip": _clip,
    "Concat": lambda a, *parts: torch.cat(parts, a["axis"]),
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": lambda _, x, y: x / y,
    "Dropout": lambda _, x, *__: x,
    "Einsum": lambda a, *parts: torch.einsum(a["equation"].decode(), *parts),
    "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
    "Equal": lambda _, x, y: x == y,
    "Erf": lambda _, x: torch.erf(x),
    "Exp": lambda _, x: x.exp(),
    "Expand": lambda _, x, shape: x * torch.ones(_ints(shape), dtype=x.dtype),
    "Flatten": lambda a, x: x.flatten(a.get("axis", 1)),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", b"none").decode()),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _, x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "GlobalMaxPool": lambda _, x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "Greater": lambda _, x, y: x > y,
    "GreaterOrEqual": lambda _, x, y: x >= y,
    "HardSigmoid": lambda a, x: (a.get("alpha", 0.2) * x + a.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": lambda _, x: F.hardswish(x),
    "Identity": lambda _, x: x,
    "LSTM": _lstm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Less": lambda _, x, y: x < y,
    "LessOrEqual": lambda _, x, y: x <= y,
    "Log": lambda _, x: x.log(),
    "MatMul": lambda _, x, y: x @ y,
    "Max": lambda _, *parts: reduce(torch.maximum, parts),
    "MaxPool": _max_pool,
    "Min": lambda _, *parts: reduce(torch.minimum, parts),
    "Mul": lambda _, x, y: x * y,
    "Neg": lambda _, x: -x,
    "Not": lambda _, x: ~x,
    "Pad": _pad,
    "Pow": lambda _, x, y: x**y,
    "Range": _range,
    "Reciprocal": lambda _, x: 1 / x,
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": lambda _, x: x.relu(),
    "Reshape": _reshape,
    "ScatterND": _scatter_nd,
    "Shape": lambda a, x: torch.tensor(x.shape[a.get("start", 0) : a.get("end")]),
    "Sigmoid": lambda _, x: x.sigmoid(),
    "Slice": _slice,
    "Softmax": lambda a, x: x.softmax(a.get("axis", -1)),
    "Split": _split,
    "Sqrt": lambda _, x: x.sqrt(),
    "Squeeze": _squeeze,
    "Sub": lambda _, x, y: x - y,
    "Tanh": lambda _, x: x.tanh(),
    "Transpose": lambda a, x: x.permute(a.get("perm", list(reversed(range(x.ndim))))),
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, c, x, y: torch.where(c, x, y),
}
"""What each operator computes, from its attributes and inputs."""
