"""Limits how often a graph runs the bodies of its Scan nodes, if this can be read from the graph.

A Scan runs its body once per slice of its scan inputs. The size of a scan input is known if it is a
graph input, an initializer, a constant or a value with a declared shape, or if ConstantOfShape or
Expand computed it from a constant shape. Scans over other tensors are not limited here, but can be
interrupted while they run. Field numbers are those of `onnx/onnx.proto`.
"""

import struct
from collections import ChainMap
from collections.abc import MutableMapping

import msgspec

from edgeasync.errors import GraphError
from edgeasync.protocol.protobuf import fields, packed, signed

SCAN_STEPS_MAX = 1 << 20
"""Maximum number of times that a body may run per run of the graph, counting nested bodies. More
would take over ten seconds.
"""

_RANK_MAX = 32
_INT64 = 7
_SHAPED_BY = {b"ConstantOfShape": 0, b"Expand": 1}
"""Operators that receive the shape of their output as an input, and the position of that input."""

_Dims = list[int]
_View = int | memoryview


class _Sizes(msgspec.Struct):
    """Known sizes of tensors by name, in a graph and its outer graphs.

    A size of 0 means unknown.
    """

    dims: MutableMapping[bytes, _Dims]
    values: MutableMapping[bytes, list[int]]
    """Values of integer vectors that may be used as shapes."""
    shapes: MutableMapping[bytes, bytes]
    """For each output of an operator in `_SHAPED_BY`: the name of the input that contains its shape."""

    def inside(self) -> "_Sizes":
        """Return a scope for a graph nested in this one."""
        return _Sizes(ChainMap({}, self.dims), ChainMap({}, self.values), ChainMap({}, self.shapes))

    def of(self, name: bytes) -> list[_Dims]:
        """Return every shape that is known for a tensor."""
        said = [self.dims.get(name), self.values.get(self.shapes.get(name, b""))]
        return [dims for dims in said if dims is not None]


class _Scan(msgspec.Struct):
    inputs: list[bytes]
    name: bytes = b""
    count: int = 0
    axes: list[int] = []
    body: memoryview = memoryview(b"")

    def steps(self, sizes: _Sizes) -> int:
        """Return how often the body runs, or 1 if this is unknown."""
        scanned = self.inputs[-self.count :] if 0 < self.count <= len(self.inputs) else []
        axes = self.axes if len(self.axes) == len(scanned) else [0] * len(scanned)
        lengths = [1]
        for name, axis in zip(scanned, axes, strict=True):
            lengths += [dims[axis] for dims in sizes.of(name) if -len(dims) <= axis < len(dims)]
        return max(lengths)


def check_scans(graph: memoryview) -> None:
    """Raise `GraphError` if a screened GraphProto is known to run a body too often."""
    _check(graph, _Sizes({}, {}, {}), 1)


def _check(graph: memoryview, sizes: _Sizes, times: int) -> None:
    """Check a graph that is itself run `times` times."""
    scans = []
    for number, value in fields(graph):
        match number:
            case 1:
                scans += _node(_bytes(value), sizes)
            case 5:
                _tensor(_bytes(value), sizes)
            case 11 | 12 | 13:
                _value(_bytes(value), sizes)
    for scan in scans:  # after all sizes are known
        steps = times * scan.steps(sizes)
        if steps > SCAN_STEPS_MAX:
            shown = ascii(scan.name[:128].decode("utf-8", "replace"))
            raise GraphError(
                f"node {shown} (Scan) runs its body {steps} times, over the limit of {SCAN_STEPS_MAX}; "
                "start the hub with a model for shorter sequences"
            )
        _check(scan.body, sizes.inside(), steps)


def _node(node: memoryview, sizes: _Sizes) -> list[_Scan]:
    """Record the output shape of a node. Return the node if it is a Scan."""
    parts: dict[int, list[memoryview]] = {}
    for number, value in fields(node):
        parts.setdefault(number, []).append(_bytes(value))
    inputs, outputs = ([bytes(name) for name in parts.get(number, [])] for number in (1, 2))
    operator, attributes = bytes(parts[4][0]), parts.get(5, [])
    if operator == b"Scan":
        return [_read_scan(inputs, bytes(parts.get(3, [memoryview(b"")])[0]), attributes)]
    place = _SHAPED_BY.get(operator)
    if place is not None and outputs and place < len(inputs):
        sizes.shapes[outputs[0]] = inputs[place]
    if operator == b"Constant" and outputs:
        for attribute in attributes:
            for number, value in fields(attribute):
                if number == 5:
                    _tensor(_bytes(value), sizes, outputs[0])
    return []


def _read_scan(inputs: list[bytes], name: bytes, attributes: list[memoryview]) -> _Scan:
    scan = _Scan(inputs, name)
    for attribute in attributes:
        parts: dict[int, list[_View]] = {}
        for number, value in fields(attribute):
            parts.setdefault(number, []).append(value)
        kind = bytes(_bytes(parts[1][0])) if 1 in parts else b""
        if kind == b"num_scan_inputs":
            scan.count = next((value for value in parts.get(3, []) if isinstance(value, int)), 0)
        elif kind == b"scan_input_axes":
            scan.axes = [signed(axis) for value in parts.get(8, []) for axis in packed(value, _RANK_MAX)]
        elif 6 in parts:
            scan.body = _bytes(parts[6][0])
    return scan


def _tensor(tensor: memoryview, sizes: _Sizes, name: bytes = b"") -> None:
    """Record the shape of a constant, and also its values if they may be used as a shape."""
    dims: list[int] = []
    values: list[int] = []
    kind = 0
    for number, value in fields(tensor):
        match number:
            case 1:
                dims += packed(value, _RANK_MAX)
            case 2 if isinstance(value, int):
                kind = value
            case 7 if len(values) <= _RANK_MAX:
                values += [signed(item) for item in packed(value, _RANK_MAX)]
            case 8:
                name = name or bytes(_bytes(value))
            case 9 if len(_bytes(value)) <= 8 * _RANK_MAX and not len(_bytes(value)) % 8:
                values = [item for (item,) in struct.iter_unpack("<q", _bytes(value))]
    sizes.dims[name] = dims
    if kind == _INT64 and len(dims) == 1:
        sizes.values[name] = values


def _value(declared: memoryview, sizes: _Sizes) -> None:
    """Record the declared shape of a value from its ValueInfoProto."""
    name = b""
    dims: list[int] | None = None
    for number, value in fields(declared):
        if number == 1:
            name = bytes(_bytes(value))
        elif number == 2:
            shapes = [shape for tensor in _parts(_bytes(value), 1) for shape in _parts(tensor, 2)]
            for shape in shapes:
                dims = [_dim(dim) for dim in _parts(shape, 1)]
    if dims is not None:
        sizes.dims[name] = dims


def _dim(dim: memoryview) -> int:
    """Return the size of an axis, or 0 if it is dynamic."""
    return next((signed(value) for number, value in fields(dim) if number == 1 and isinstance(value, int)), 0)


def _parts(message: memoryview, wanted: int) -> list[memoryview]:
    return [_bytes(value) for number, value in fields(message) if number == wanted]


def _bytes(value: _View) -> memoryview:
    assert isinstance(value, memoryview)
    return value
