"""Splits a training graph into a small graph and its base, the file of its frozen values.

A device downloads a base once and caches it by its fingerprint, so another run of the same frozen
model sends only the small graph. onnxruntime maps the base, so its values are never copied.

The graph is rewritten without the `onnx` package and without copying values. Values are in the
order in which the graph lists its constants, so the same frozen model yields the same base whatever
loss or optimizer is used.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edgeasync.durable.files import replace_file
from edgeasync.errors import StorageError
from edgeasync.protocol.graph import Base
from edgeasync.protocol.protobuf import VARINT, message, raw_fields, written
from edgeasync.protocol.wire import Buffer
from edgeasync.regular_file import open_regular
from edgeasync.training.tensor_check import EXTERNAL, LENGTH, LOCATION, OFFSET

BASE_BYTES_MIN = 1 << 20
"""Frozen values of less than this size stay in the graph. Sending them again with the graph costs
less than 10 s at 1 Mbit/s, and a file of their own would cost two more messages and a place in the
cache.
"""

VALUE_BYTES_MIN = 1 << 10
"""Smaller constants stay in the graph. onnxruntime reads some of them, such as shapes, while it
loads the graph.
"""

ALIGNED_BYTES = 64
"""Alignment of the values in a base, which is the length of a cache line."""

_MODEL_GRAPH, _GRAPH_INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
"""Field numbers of `onnx.proto`."""

_PADDING = bytes(ALIGNED_BYTES)


class SplitGraph(NamedTuple):
    """A serialized training graph without its base, and the base, or `None` if there is none."""

    graph: Buffer
    base: Base | None


def split_base(graph: Buffer, folder: Path) -> SplitGraph:
    """Write the frozen values of a valid graph to a file in `folder`, and return the rest.

    The file is named after its content. It is not written again if it exists. Return the same graph
    if it is too small for a base. Raises `StorageError`.
    """
    nbytes = base_bytes_of(graph)
    if not nbytes:
        return SplitGraph(graph, None)
    view = memoryview(graph).cast("B")
    values = list(_values(view))
    parts = [part for value in values for part in (value, _PADDING[: _aligned(len(value)) - len(value)])]
    base = Base(_hash(parts), nbytes)
    file = folder / base.file_name
    if not holds(file, base):
        replace_file(file, *parts)
    return SplitGraph(b"".join(_rewritten(view, base)), base)


def base_bytes_of(graph: Buffer) -> int:
    """Return the size of a graph's base in bytes, or 0 if the graph is too small for one."""
    nbytes = sum(_aligned(len(value)) for value in _values(memoryview(graph).cast("B")))
    return nbytes if nbytes >= BASE_BYTES_MIN else 0


def holds(file: Path, base: Base) -> bool:
    """Return whether a file contains this base; raises `StorageError` if it cannot be read."""
    try:
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == base.fingerprint
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}; correct its permissions") from error


def _hash(parts: Sequence[Buffer]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _values(model: memoryview) -> Iterator[memoryview]:
    """Yield the values that belong into the base, in the order of the graph."""
    for number, _, graph in raw_fields(model):
        if number == _MODEL_GRAPH:
            for inner, _, tensor in raw_fields(graph):
                if inner == _GRAPH_INITIALIZER and (raw := _raw(tensor)) is not None:
                    yield raw


def _raw(tensor: memoryview) -> memoryview | None:
    """Return the values of a constant, or `None` if the constant stays in the graph."""
    raw = next((value for number, _, value in raw_fields(tensor) if number == _RAW_DATA), None)
    return None if raw is None or len(raw) < VALUE_BYTES_MIN else raw


def _rewritten(model: memoryview, base: Base) -> Iterator[Buffer]:
    """Yield the parts of the model whose large constants refer to the base."""
    for number, whole, graph in raw_fields(model):
        if number != _MODEL_GRAPH:
            yield whole
            continue
        parts: list[Buffer] = []
        offset = 0
        for inner, entry, tensor in raw_fields(graph):
            raw = _raw(tensor) if inner == _GRAPH_INITIALIZER else None
            if raw is None:
                parts.append(entry)
            else:
                parts.append(message(_GRAPH_INITIALIZER, _referring(tensor, base, offset, len(raw))))
                offset += _aligned(len(raw))
        yield message(_MODEL_GRAPH, b"".join(parts))


def _referring(tensor: memoryview, base: Base, offset: int, length: int) -> bytes:
    """Return a constant without its values, which are at `offset` in the base."""
    entries = {LOCATION: base.file_name, OFFSET: str(offset), LENGTH: str(length)}
    return b"".join(
        [
            *[whole for number, whole, _ in raw_fields(tensor) if number != _RAW_DATA],
            *[
                message(_EXTERNAL_DATA, message(1, key.encode()) + message(2, value.encode()))
                for key, value in entries.items()
            ],
            written(_DATA_LOCATION << 3 | VARINT),
            written(EXTERNAL),
        ]
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
