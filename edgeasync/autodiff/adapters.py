"""Inserts LoRA adapters into a forward model, and merges trained ones into its weights."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff import precision, reading
from edgeasync.autodiff.contents import SOURCE
from edgeasync.autodiff.graph import FLOAT, Array, refill
from edgeasync.autodiff.layers import StoredLayer, find_layers, without_numbers
from edgeasync.errors import GraphError
from edgeasync.lora import LoRA
from edgeasync.parameters import matches
from edgeasync.structs import parse_json

LORA = "edgeasync.lora"
"""Metadata key with the settings of the adapters in a model, as JSON."""

_A, _B = ".lora_A.weight", ".lora_B.weight"
_SCALING = "::lora_scaling"
_BASE = "::base"
"""Ending of the name of an adapted layer's own result."""


class AdaptedModel(msgspec.Struct, frozen=True):
    """A serialized forward model with adapters, the names of their arrays, and a note for the user.

    `lora` names the adapted layers in full.
    """

    model: bytes
    lora: LoRA
    names: tuple[str, ...]
    note: str


def adapters_of(layer: str) -> tuple[str, str]:
    """Return the names of the arrays `A` and `B` of a layer's adapter."""
    return layer + _A, layer + _B


def is_adapter(name: str) -> bool:
    """Return whether an array belongs to an adapter, according to its name."""
    return name.endswith((_A, _B))


def adapt(model: bytes, lora: LoRA, train: Iterable[str] = ()) -> AdaptedModel:
    """Insert adapters beside the layers of a serialized model that `lora` names.

    Layers whose weights match a pattern of `train` have none, because they are trained themselves.
    Only names and shapes of the weights matter, so quantized weights stay quantized. A model that
    has just these adapters is not changed, so that a hub can resume from it. Raises `GraphError` if
    a pattern matches no layer, or if the model has other adapters.
    """
    proto = reading.inline_functions(reading.load(model))
    precision.widen_halves(proto)
    if (made := settings_in(proto)) is not None:
        if not _is_same(made, lora):
            raise GraphError(
                "the model has other LoRA adapters already; pass the model without them, or merge them into the "
                "float32 model that they were trained on, with `edgeasync export RUN --model FILE`"
            )
        names = tuple([name for layer in made.patterns for name in adapters_of(layer)])
        return AdaptedModel(model, made, names, f"continues to train LoRA adapters of rank {made.rank}")
    found = find_layers(proto)
    whole = [name for name, layer in found.items() if any(matches(layer.weight, pattern) for pattern in train)]
    layers = {name: layer for name, layer in found.items() if name not in whole}
    for pattern in lora.patterns:
        alone = msgspec.structs.replace(lora, targets=pattern)
        if not any(map(alone.adapts, layers)):
            raise GraphError(_unmatched(pattern, layers, [*filter(alone.adapts, whole)]))
    chosen = [layer for name, layer in layers.items() if lora.adapts(name)]
    taken = {entry.name for entry in proto.graph.initializer}.union(*[node.output for node in proto.graph.node])
    arrays: dict[str, Array] = {}
    for layer in chosen:
        arrays |= zip(adapters_of(layer.name), _initial(layer, lora), strict=True)
    if twice := taken.intersection(arrays):
        raise GraphError(f"the model has a tensor {min(twice)!r} already; rename it in the model")
    proto.graph.initializer.extend([numpy_helper.from_array(value, name) for name, value in arrays.items()])
    by_result = {result: layer for layer in chosen for result in layer.results}
    scaling = numpy_helper.from_array(np.array(lora.scaling, np.float32))
    nodes = [helper.make_node("Constant", [], [_SCALING], _SCALING, value=scaling)]
    for node in proto.graph.node:
        adapted = by_result.get(node.output[0]) if node.output else None
        nodes += [node] if adapted is None else _with_adapter(node, adapted)
    refill(proto.graph.node, nodes)
    exact = msgspec.structs.replace(lora, targets=",".join([layer.name for layer in chosen]))
    helper.set_model_props(proto, {entry.key: entry.value for entry in proto.metadata_props} | metadata_of(exact))
    told = ", ".join(without_numbers([layer.name for layer in chosen]))
    count = sum(value.size for value in arrays.values())
    place = f"{len(chosen)} of {len(layers)} layers: {told}"
    note = f"trains LoRA adapters of rank {lora.rank} and alpha {lora.alpha:g}, {count} parameters, in {place}"
    narrow = {layer.name: width for layer in chosen if (width := _width(layer)) < lora.rank}
    if narrow:
        said = ", ".join(without_numbers(narrow))
        note += f"; rank {max(narrow.values())} would suffice for those with fewer inputs or outputs: {said}"
    return AdaptedModel(proto.SerializeToString(), exact, tuple(arrays), note)


def _width(layer: StoredLayer) -> int:
    """Return the rank of any change of a layer's weight, at most."""
    return min(layer.shape[0], math.prod(layer.shape[1:]))


def _is_same(made: LoRA, lora: LoRA) -> bool:
    """Return whether a model's adapters, which name all layers, are those that `lora` describes."""
    return msgspec.structs.replace(lora, targets=made.targets) == made and all(map(lora.adapts, made.patterns))


def _unmatched(pattern: str, layers: Mapping[str, StoredLayer], whole: Sequence[str]) -> str:
    """Return why no layer has adapters. `whole` are layers that `pattern` matches, but that are trained whole."""
    if whole:
        return (
            f"the LoRA pattern {pattern!r} matches only layers that have no adapter, because the patterns of "
            f"parameters to train name their weights: {', '.join(without_numbers(whole))}; change a pattern"
        )
    if not layers:
        return (
            "the model has no layer that LoRA adapters fit, that is, no MatMul, Gemm or Conv without groups whose "
            "weight is a float32 or dequantized initializer that no other operator reads"
        )
    return f"no layer matches the LoRA pattern {pattern!r}; the layers are {', '.join(without_numbers(layers))}"


def _initial(layer: StoredLayer, lora: LoRA) -> tuple[Array, Array]:
    """Return the initial values of an adapter, as in PEFT: `A` is Kaiming uniform, and `B` is zero.

    The values depend on the seed and the layer's name alone.
    """
    outputs, *inside = layer.shape
    generator = np.random.default_rng([lora.seed, zlib.crc32(layer.name.encode())])
    bound = np.prod(inside) ** -0.5
    first = generator.uniform(-bound, bound, (lora.rank, *inside)).astype(FLOAT)
    return first, np.zeros((outputs, lora.rank, *[1 for _ in inside[1:]]), FLOAT)


def _with_adapter(node: onnx.NodeProto, layer: StoredLayer) -> list[onnx.NodeProto]:
    """Return the nodes of a layer and its adapter, which compute the same tensor as the layer did."""
    x, result = node.input[0], node.output[0]
    first, second = adapters_of(layer.name)

    def named(part: str) -> str:
        return f"{result}::lora_{part}"

    def op(kind: str, inputs: Sequence[str], part: str) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [named(part)], named(part))

    node.output[0] = result + _BASE
    if node.op_type == "Conv":
        reduced = op("Conv", [x, first], "A")
        reduced.attribute.extend(node.attribute)
        products = [reduced, op("Conv", [named("scaled"), second], "B")]
    else:
        turned = [
            helper.make_node("Transpose", [array], [named(part)], named(part), perm=[1, 0])
            for array, part in ((first, "A_T"), (second, "B_T"))
        ]
        products = [
            *[*turned, op("MatMul", [x, named("A_T")], "A")],
            op("MatMul", [named("scaled"), named("B_T")], "B"),
        ]
    scaled = op("Mul", [named("A"), _SCALING], "scaled")
    total = helper.make_node("Add", [node.output[0], named("B")], [result], f"{result}::lora")
    return [node, *products[:-1], scaled, products[-1], total]


def settings_in(model: onnx.ModelProto) -> LoRA | None:
    """Return the settings of the adapters in a model. Raises `GraphError` if they are damaged."""
    said = next((entry.value for entry in model.metadata_props if entry.key == LORA), None)
    try:
        return None if said is None else parse_json(said, LoRA)
    except ValueError as error:
        raise GraphError(f"the model's metadata {LORA!r} is damaged ({error}); build the model again") from error


def metadata_of(lora: LoRA) -> dict[str, str]:
    """Return the metadata of a model with these adapters."""
    return {LORA: msgspec.json.encode(lora).decode()}


def adapt_as(model: bytes, graph: bytes) -> bytes:
    """Insert the adapters that a serialized training graph trains into a forward model without them."""
    lora = settings_in(reading.read_message(graph))  # the graph's base is another file, which is not needed
    if lora is None or settings_in(reading.read(model)) is not None:
        return model
    return adapt(model, lora).model


def adapted_layers(model: onnx.ModelProto) -> list[StoredLayer]:
    """Return the layers of a model that have an adapter."""
    names = {entry.name for entry in model.graph.initializer}
    return [layer for layer in find_layers(model).values() if names.issuperset(adapters_of(layer.name))]


def merge(model: onnx.ModelProto) -> None:
    """Add each adapter to the weight of its layer, and remove the adapter.

    A quantized weight cannot represent the sum, so its adapter stays. The model names its source
    only while it has adapters, because another run may train its other arrays.
    """
    lora = settings_in(model)
    if lora is None:
        _remove_metadata(model, SOURCE)
        return
    values = {entry.name: entry for entry in model.graph.initializer}
    layers = adapted_layers(model)
    merged = [layer for layer in layers if not layer.is_quantized]
    precision.widen_weights(model, {layer.weight for layer in merged})
    stored = dict(reading.stored_tensors(model.graph))
    for layer in merged:
        tensor = stored[layer.weight]
        first, second = [numpy_helper.to_array(values[name]) for name in adapters_of(layer.name)]
        delta = weight_change(first, second, lora)
        weight = reading.array_of(tensor, f"tensor {layer.weight!r}")
        tensor.CopyFrom(numpy_helper.from_array(weight + (delta.T if layer.is_transposed else delta), tensor.name))
    _remove(model, merged)
    if len(merged) == len(layers):
        _remove_metadata(model, LORA, SOURCE)


def _remove_metadata(model: onnx.ModelProto, *keys: str) -> None:
    refill(model.metadata_props, [entry for entry in model.metadata_props if entry.key not in keys])


def weight_change(first: Array, second: Array, lora: LoRA) -> Array:
    """Return what an adapter adds to a weight of shape (outputs, inputs, ...)."""
    outputs, rank = second.shape[:2]
    product = (second.reshape(outputs, rank) * FLOAT.type(lora.scaling)) @ first.reshape(rank, -1)
    return product.reshape(outputs, *first.shape[1:]).astype(FLOAT)


def _remove(model: onnx.ModelProto, layers: Iterable[StoredLayer]) -> None:
    """Remove the adapters of layers."""
    graph, arrays, made = model.graph, set[str](), set[str]()
    restored: dict[str, str] = {}
    for layer in layers:
        arrays.update(adapters_of(layer.name))
        for result in layer.results:
            original = result.removesuffix(_BASE)
            restored[result] = original
            made.update(f"{original}::lora_{part}" for part in ("A", "A_T", "B", "B_T", "scaled"))
            made.add(original)
    nodes = [node for node in graph.node if made.isdisjoint(node.output)]
    for node in nodes:
        node.output[:] = [restored.get(name, name) for name in node.output]
    read = {name for node in nodes for name in node.input}
    refill(graph.node, [node for node in nodes if _SCALING not in node.output or _SCALING in read])
    for place in reversed(range(len(graph.initializer))):  # in place, because the others may be large
        if graph.initializer[place].name in arrays:
            del graph.initializer[place]
