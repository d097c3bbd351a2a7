"""Finds the layers of a model that adapters fit, and their weights."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import onnx
from onnx import TensorProto

from edgeasync.autodiff.graph import Node, free_inputs, read_nodes
from edgeasync.autodiff.reading import stored_tensors
from edgeasync.autodiff.settings import NAMES_MAX

_FLOATS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_KEPT = frozenset({"Cast", "DequantizeLinear", "Identity"})
"""Operators that may compute a layer's weight from the stored one, besides Transpose."""


class StoredLayer(msgspec.Struct, frozen=True):
    """A matrix product or convolution with a stored weight, used by one or more nodes.

    `shape` is (outputs, inputs) and, for a convolution, the size of the kernel. `results` are the
    outputs of the nodes.
    """

    name: str
    """The name of the weight without `.weight`, as in torch."""
    weight: str
    shape: tuple[int, ...]
    results: tuple[str, ...]
    is_transposed: bool
    """Whether the file stores the weight as (inputs, outputs) instead of (outputs, inputs)."""
    is_quantized: bool

    @property
    def has_torch_name(self) -> bool:
        """Whether the weight may be that of a torch module with the layer's name."""
        dotted = re.fullmatch(r"\w+(\.\w+)*", self.name) is not None
        return dotted and self.weight.removesuffix("_quantized") == f"{self.name}.weight"


class _Use(msgspec.Struct, frozen=True):
    """How a node uses a stored tensor: after which operators, and transposed or not."""

    weight: str
    operators: frozenset[str] = frozenset()
    is_transposed: bool = False


def find_layers(model: onnx.ModelProto) -> dict[str, StoredLayer]:
    """Return the layers that adapters fit, by name.

    These are MatMul and Gemm with a stored weight on the right, and Conv without groups. The weight
    may be quantized, that is, the input of a DequantizeLinear. A weight that other operators read
    too is left out, such as an embedding that is tied to the last layer: an adapter would not
    change the other use.
    """
    stored = dict(stored_tensors(model.graph))
    nodes = read_nodes(model.graph.node)
    uses = _uses(nodes, stored)
    found: dict[str, list[tuple[Node, _Use]]] = {}
    others = {entry.name for entry in model.graph.output}
    for node in nodes:
        use = uses.get(node.inputs[1]) if len(node.inputs) > 1 else None
        fits = use is not None and _fits(node, use, stored[use.weight])
        if use is not None and fits:
            found.setdefault(use.weight, []).append((node, use))
        if not any(output in uses for output in node.outputs):
            others.update(name for name in free_inputs(node) if not fits or name != node.inputs[1])
    read_otherwise = {uses[name].weight for name in others if name in uses}
    layers: dict[str, StoredLayer] = {}
    for weight, readers in found.items():
        layer = _layer(weight, tuple(stored[weight].dims), readers)
        if weight not in read_otherwise and layer is not None:
            layers.setdefault(layer.name, layer)
    return layers


def _uses(nodes: Iterable[Node], stored: Mapping[str, TensorProto]) -> dict[str, _Use]:
    """Return, for each tensor that is a stored one or computed from one alone, which one it is."""
    uses = {name: _Use(name) for name in stored}
    for node in nodes:
        use = uses.get(node.inputs[0]) if node.inputs and not node.domain else None
        if use is None:
            continue
        turned = node.op == "Transpose" and len(stored[use.weight].dims) == 2
        if node.op in _KEPT or turned:
            uses[node.outputs[0]] = _Use(
                use.weight, use.operators | {node.op}, use.is_transposed ^ (turned and _swaps(node))
            )
    return uses


def _swaps(node: Node) -> bool:
    return list(node.attributes.get("perm", (1, 0))) == [1, 0]


def _fits(node: Node, use: _Use, tensor: TensorProto) -> bool:
    """Return whether a node is a layer in float32, whose weight is its second input."""
    is_float = tensor.data_type == TensorProto.FLOAT or (tensor.data_type in _FLOATS and "Cast" in use.operators)
    if node.domain or not (is_float or "DequantizeLinear" in use.operators):
        return False
    given = node.attributes
    match node.op:
        case "MatMul":
            return len(tensor.dims) == 2
        case "Gemm":
            return len(tensor.dims) == 2 and not given.get("transA") and given.get("alpha", 1.0) == 1.0
        case "Conv":
            return given.get("group", 1) == 1 and "Transpose" not in use.operators
    return False


def _layer(weight: str, dims: tuple[int, ...], readers: Sequence[tuple[Node, _Use]]) -> StoredLayer | None:
    """Return a layer, or `None` if nodes use the weight in different ways."""
    kinds = {node.op == "Conv" for node, _ in readers}
    # A product multiplies by (inputs, outputs). Without a Transpose, the weight is stored like that.
    stored_so = {
        node.op != "Conv" and use.is_transposed == bool(node.attributes.get("transB")) for node, use in readers
    }
    if len(kinds) > 1 or len(stored_so) > 1:
        return None
    (is_transposed,) = stored_so
    quantized = any("DequantizeLinear" in use.operators for _, use in readers)
    name = weight.removesuffix("_quantized") if quantized else weight
    return StoredLayer(
        name=name.removesuffix(".weight"),
        weight=weight,
        shape=dims[::-1] if is_transposed else dims,
        results=tuple([node.outputs[0] for node, _ in readers]),
        is_transposed=is_transposed,
        is_quantized=quantized,
    )


def without_numbers(names: Collection[str]) -> list[str]:
    """Return `names`, or if there are many, shell patterns for those that differ only in numbers.

    >>> without_numbers([*[f"layers.{n}.q" for n in range(9)], "head"])
    ['layers.*.q', 'head']
    """
    if len(names) <= NAMES_MAX:
        return list(names)
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "*", name), []).append(name)
    return [pattern if len(own) > 1 else own[0] for pattern, own in families.items()]
