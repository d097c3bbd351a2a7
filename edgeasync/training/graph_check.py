"""Screens a graph that a device received from a hub, before onnxruntime loads it.

A small parser of protobuf's wire format walks the whole message, without the `onnx` package and
without copying tensors. The parser is strict where protobuf is lenient: it rejects unknown fields,
wrong wire types, and singular fields that occur more than once. Therefore, onnxruntime cannot read
anything from the bytes that was not checked here. Field numbers are those of `onnx/onnx.proto`.

The screen rejects everything that could run code or read files: operators that are not on the list
of allowed ones, functions, control flow except `Scan`, and tensors stored outside the graph, except
constants in the base that the hub announced (`tensor_check.py`). It also rejects messages that
would exhaust the parser's memory, and limits loops whose length is part of the graph
(`scan_lengths.py`).

The screen does not limit what allowed operators compute: an `Expand` or a `ConstantOfShape` may
allocate any amount of memory. It does not check types and shapes, because onnxruntime does, and it
does not protect against bugs in onnxruntime's operators. So a malicious hub can use up a device's
time and memory, but should not be able to do more.
"""

from collections.abc import Iterator

from edgeasync.errors import GraphError
from edgeasync.protocol.graph import Base
from edgeasync.protocol.operators import ALLOWED, ALLOWED_OWN
from edgeasync.protocol.protobuf import BYTES, EIGHT, FOUR, VARINT, field, varint
from edgeasync.protocol.wire import Buffer
from edgeasync.training.scan_lengths import check_scans
from edgeasync.training.tensor_check import EXTERNAL_FIELDS, TensorFields

NODES_MAX = 20_000
DEPTH_MAX = 4
"""Maximum nesting depth of graphs: the model's graph, and the bodies of Scan nodes within it."""

FIELDS_MAX = 2_000_000
"""Maximum number of fields in a message. A real graph has a few per node; parsing more would only
waste time.
"""

OPSET_MIN, OPSET_MAX = 13, 28

_OWN = b"com.microsoft"

_DIVISORS = frozenset(
    {b"group", b"num_groups", b"num_heads", b"q_num_heads", b"kv_num_heads", b"blocksize", b"K", b"N", b"bits",
     b"block_size"}
)  # fmt: skip

_MEND = "start the hub with a self-contained model of standard operators"

# Field number -> name and wire types. A name with a star may occur any number of times.
_Schema = dict[int, tuple[str, tuple[int, ...]]]
_ONE, _MANY = (BYTES,), (VARINT, BYTES)
_MODEL: _Schema = {
    1: ("ir_version", (VARINT,)), 2: ("producer_name", _ONE), 3: ("producer_version", _ONE), 4: ("domain", _ONE),
    5: ("model_version", (VARINT,)), 6: ("doc_string", _ONE), 7: ("graph", _ONE), 8: ("opset_import*", _ONE),
    14: ("metadata_props*", _ONE), 20: ("training_info*", _ONE), 25: ("functions*", _ONE),
}  # fmt: skip
_OPSET: _Schema = {1: ("domain", _ONE), 2: ("version", (VARINT,))}
_GRAPH: _Schema = {
    1: ("node*", _ONE), 2: ("name", _ONE), 5: ("initializer*", _ONE), 10: ("doc_string", _ONE),
    11: ("input*", _ONE), 12: ("output*", _ONE), 13: ("value_info*", _ONE), 15: ("sparse_initializer*", _ONE),
    16: ("metadata_props*", _ONE),
}  # fmt: skip
_NODE: _Schema = {
    1: ("input*", _ONE), 2: ("output*", _ONE), 3: ("name", _ONE), 4: ("op_type", _ONE), 5: ("attribute*", _ONE),
    6: ("doc_string", _ONE), 7: ("domain", _ONE), 8: ("overload", _ONE), 9: ("metadata_props*", _ONE),
}  # fmt: skip
_ATTRIBUTE: _Schema = {
    1: ("name", _ONE), 2: ("f", (FOUR,)), 3: ("i", (VARINT,)), 4: ("s", _ONE), 5: ("t", _ONE), 6: ("g", _ONE),
    7: ("floats*", (FOUR, BYTES)), 8: ("ints*", _MANY), 9: ("strings*", _ONE), 10: ("tensors*", _ONE),
    11: ("graphs*", _ONE), 13: ("doc_string", _ONE), 14: ("tp", _ONE), 15: ("type_protos*", _ONE),
    20: ("type", (VARINT,)), 21: ("ref_attr_name", _ONE), 22: ("sparse_tensor", _ONE),
    23: ("sparse_tensors*", _ONE),
}  # fmt: skip
_TENSOR: _Schema = {
    1: ("dims*", _MANY), 2: ("data_type", (VARINT,)), 3: ("segment", _ONE), 4: ("float_data*", (FOUR, BYTES)),
    5: ("int32_data*", _MANY), 6: ("string_data*", _ONE), 7: ("int64_data*", _MANY), 8: ("name", _ONE),
    9: ("raw_data", _ONE), 10: ("double_data*", (EIGHT, BYTES)), 11: ("uint64_data*", _MANY),
    12: ("doc_string", _ONE), 13: ("external_data*", _ONE), 14: ("data_location", (VARINT,)),
    16: ("metadata_props*", _ONE),
}  # fmt: skip
_VALUE: _Schema = {
    1: ("name", _ONE), 2: ("type", _ONE), 3: ("doc_string", _ONE), 4: ("metadata_props*", _ONE),
}  # fmt: skip
_TYPE: _Schema = {1: ("tensor_type", _ONE), 6: ("denotation", _ONE)}
_TENSOR_TYPE: _Schema = {1: ("elem_type", (VARINT,)), 2: ("shape", _ONE)}
_SHAPE: _Schema = {1: ("dim*", _ONE)}
_DIM: _Schema = {1: ("dim_value", (VARINT,)), 2: ("dim_param", _ONE), 3: ("denotation", _ONE)}
_ENTRY: _Schema = {1: ("key", _ONE), 2: ("value", _ONE)}

_SKIMMED = {"type": _TYPE, "tensor_type": _TENSOR_TYPE, "shape": _SHAPE, "dim": _DIM}
"""Messages within the type of a value. onnxruntime checks their content."""

_FOREIGN = {
    "functions": "functions of its own",
    "training_info": "a training_info",
    "sparse_initializer": "sparse tensors",
    "sparse_tensor": "sparse tensors",
    "sparse_tensors": "sparse tensors",
    "tensors": "a list of tensors",
    "graphs": "a list of graphs",
    "tp": "a type",
    "type_protos": "types",
    "ref_attr_name": "a function's parameter",
    "overload": "an overloaded function",
    "segment": "values in segments",
    "string_data": "text",
    "external_data": "values in another file",
    "data_location": "values in another file",
}
"""Fields that no training graph needs, with the names that error messages use for them."""

_EMPTY_IS_ABSENT = frozenset({"ref_attr_name", "overload", "data_location"})
"""Fields that count as absent if they have their default value."""


def check_graph(model: Buffer, *, bytes_max: int, base: Base | None = None) -> None:
    """Screen a serialized ONNX model, which may be arbitrary bytes.

    `bytes_max` limits the size of the message, including its constants. Constants may be in `base`
    instead, if the hub has announced one. Raises `GraphError` if the model is rejected.
    """
    view = memoryview(model).cast("B")
    if len(view) > bytes_max:
        raise GraphError(f"the graph has {len(view)} bytes, over the limit of {bytes_max}; raise graph_bytes_max")
    _Screen(base).model(view)


class _Screen:
    """Walks through one message once, with counters for everything that has a limit."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        self._nodes = self._fields = 0
        self._has_scans = False

    def model(self, view: memoryview) -> None:
        graph: memoryview | None = None
        opsets: list[bool] = []
        for name, value in self._walk(view, _MODEL, "the graph"):
            if name == "graph":
                graph = _bytes(value)
            elif name == "opset_import":
                opsets.append(self._opset(_bytes(value)))
            elif name in _FOREIGN:
                raise GraphError(
                    f"the graph has {_FOREIGN[name]}; start the hub with a model of standard operators"
                )
        if graph is None:
            raise GraphError("the hub's file contains no graph; start the hub with an ONNX model")
        if sorted(opsets) not in ([False], [False, True]):
            raise GraphError(
                f"the graph imports {len(opsets)} operator sets; it must import ai.onnx once, and may import "
                "com.microsoft once"
            )
        self._graph(graph, 1)
        if self._has_scans:
            check_scans(graph)

    def _opset(self, view: memoryview) -> bool:
        """Check an opset import. Return whether it imports onnxruntime's own operators."""
        domain, version = b"", 0
        for name, value in self._walk(view, _OPSET, "an opset_import"):
            if name == "domain":
                domain = bytes(_bytes(value))
            else:
                version = _int(value)
        if domain == _OWN and version == 1:
            return True
        _check_domain(domain, "the graph imports operators")
        if not OPSET_MIN <= version <= OPSET_MAX:
            raise GraphError(
                f"the graph has opset {version}; start the hub with a model of opset {OPSET_MIN} to {OPSET_MAX}"
            )
        return False

    def _graph(self, view: memoryview, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise GraphError(
                f"subgraphs are nested more than {DEPTH_MAX} levels deep; start the hub with a model that has "
                "fewer levels"
            )
        for name, value in self._walk(view, _GRAPH, "a graph"):
            match name:
                case "node":
                    self._node(_bytes(value), depth)
                case "initializer":
                    self._tensor(_bytes(value), self._base)
                case "input" | "output" | "value_info":
                    self._skim(_bytes(value), _VALUE)

    def _node(self, view: memoryview, depth: int) -> None:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise GraphError(f"the graph has more than {NODES_MAX} nodes; start the hub with a smaller model")
        operator = node_name = domain = b""
        attributes = []
        for name, value in self._walk(view, _NODE, "a node"):
            match name:
                case "op_type":
                    operator = bytes(_bytes(value)[:128])
                case "name":
                    node_name = bytes(_bytes(value)[:128])
                case "domain":
                    domain = bytes(_bytes(value)[:128])
                case "attribute":
                    attributes.append(_bytes(value))
        where = _where(node_name, operator)
        allowed = ALLOWED
        if domain == _OWN:
            allowed = ALLOWED_OWN
        else:
            _check_domain(domain, f"{where} is")
        if operator.decode("ascii", "replace") not in allowed:
            raise GraphError(
                f"{where}: this operator is not supported on devices; start the hub with a model without it"
            )
        self._has_scans |= operator == b"Scan"
        for attribute in attributes:
            self._attribute(attribute, operator, where, depth)

    def _attribute(self, view: memoryview, operator: bytes, where: str, depth: int) -> None:
        body: memoryview | None = None
        number: int | None = None
        attribute_name = b""
        for name, value in self._walk(view, _ATTRIBUTE, f"an attribute of {where}"):
            if name == "name":
                attribute_name = bytes(_bytes(value)[:128])
            elif name == "g":
                body = _bytes(value)
            elif name == "t":
                self._tensor(_bytes(value))
            elif name == "i":
                number = _int(value)
        if number is not None and attribute_name in _DIVISORS and not 0 < number < 1 << 31:
            # onnxruntime divides by this number, so a 0 would crash the process.
            raise GraphError(f"{where}: {attribute_name.decode()} must be from 1 to 2**31 - 1; {_MEND}")
        if body is not None:
            if (operator, attribute_name) != (b"Scan", b"body"):
                raise GraphError(
                    f"{where} contains a subgraph, which only a Scan node may have (its body); start the "
                    "hub with a model without other subgraphs"
                )
            self._graph(body, depth + 1)

    def _tensor(self, view: memoryview, base: Base | None = None) -> None:
        tensor = TensorFields()
        for name, value in self._walk(view, _TENSOR, "a tensor", EXTERNAL_FIELDS if base else frozenset()):
            if name == "external_data":
                self._skim(_bytes(value), _ENTRY)
            tensor.add(name, value)
        tensor.check(base)

    def _skim(self, view: memoryview, schema: _Schema) -> None:
        """Check that a message and its nested messages are well-formed."""
        for name, value in self._walk(view, schema, "an entry"):
            if (inner := _SKIMMED.get(name)) is not None:
                self._skim(_bytes(value), inner)

    def _walk(
        self, view: memoryview, schema: _Schema, where: str, allowed: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, int | memoryview]]:
        """Yield the name and value of every field. A value is an integer or a view of bytes.

        Fields in `_FOREIGN` are rejected unless they are `allowed`.
        """
        at, end = 0, len(view)
        seen: set[str] = set()
        while at < end:
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise GraphError(
                    f"the graph has more than {FIELDS_MAX} fields; start the hub with a smaller model"
                )
            tag, at = varint(view, at)
            name, wire_types = schema.get(tag >> 3, ("", ()))
            if tag & 7 not in wire_types:
                raise GraphError(f"{where} has an unknown field {tag >> 3}; check that the file is an ONNX model")
            if name[-1] == "*":
                name = name[:-1]
            elif name in seen:
                raise GraphError(f"{where} has two values of {name}; the graph is damaged or malicious")
            seen.add(name)
            value, at = field(view, at, tag & 7)
            if at > end:
                raise GraphError(f"{where} ends in the middle of {name}; the graph is damaged")
            if name == "metadata_props":
                self._skim(_bytes(value), _ENTRY)
            elif name in _FOREIGN and name not in allowed and (value or name not in _EMPTY_IS_ABSENT):
                raise GraphError(f"{where} has {_FOREIGN[name]}; {_MEND}")
            else:
                yield name, value


def _bytes(value: int | memoryview) -> memoryview:
    assert isinstance(value, memoryview)
    return value


def _int(value: int | memoryview) -> int:
    assert isinstance(value, int)
    return value


def _check_domain(domain: bytes, what: str) -> None:
    if domain not in (b"", b"ai.onnx"):
        raise GraphError(
            f"{what} of the domain {_shown(domain)}, but devices support operators of ai.onnx only; {_MEND}"
        )


def _where(node: bytes, operator: bytes) -> str:
    kind = _text(memoryview(operator)) or "no operator"
    return f"node {_shown(node)} ({kind})" if node else f"a node ({kind})"


def _shown(name: bytes) -> str:
    return repr(_text(memoryview(name)))


def _text(name: memoryview) -> str:
    text = bytes(name[:128]).decode("utf-8", "replace")
    return text if text.isprintable() else ascii(text)
