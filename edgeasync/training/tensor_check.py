"""Checks the tensors of a graph from a hub: their types, sizes, and where their values are.

The values are in the tensor itself, or in the base, a file that the hub sends separately. A tensor
may name only its base, and only bytes within it. Part of the screen in `graph_check.py`.
"""

import math

from edgeasync.errors import GraphError
from edgeasync.protocol.graph import Base
from edgeasync.protocol.protobuf import fields, packed

DIMS_MAX = 32

EXTERNAL = 1
"""`TensorProto.DataLocation` of values in another file."""

EXTERNAL_FIELDS = frozenset({"external_data", "data_location"})
"""Fields of a tensor whose values are in another file."""

LOCATION, OFFSET, LENGTH = "location", "offset", "length"
"""Keys of the entries in `external_data`: file name, first byte and number of bytes."""

_ENTRIES = 3
_DIGITS_MAX = 16

_ITEM_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16,
              21: 4, 22: 4}  # fmt: skip
"""Number of bits per value, by TensorProto.DataType, for numbers and booleans."""


class TensorFields:
    """The fields of one tensor, collected by the screen."""

    def __init__(self) -> None:
        self._dims: list[int] = []
        self._entries: list[memoryview] = []
        self._type = self._held = self._location = 0
        self._raw: int | None = None
        self._name = b""

    def add(self, name: str, value: int | memoryview) -> None:
        """Add a field. Raises `GraphError` if the tensor has too many dimensions."""
        if isinstance(value, int):
            match name:
                case "data_type":
                    self._type = value
                case "data_location":
                    self._location = value
        else:
            match name:
                case "name":
                    self._name = bytes(value[:128])
                case "raw_data":
                    self._raw = len(value)
                case "external_data" if len(self._entries) <= _ENTRIES:
                    self._entries.append(value)
        match name:
            case "dims":
                self._dims += packed(value, DIMS_MAX)
            case "float_data" | "double_data" | "int32_data" | "int64_data" | "uint64_data":
                self._held += 1 if isinstance(value, int) else len(value)
        if len(self._dims) > DIMS_MAX:
            raise GraphError(f"{self._where} has more than {DIMS_MAX} dimensions; the graph is damaged")

    def check(self, base: Base | None) -> None:
        """Check the tensor once all fields were added; raises `GraphError`."""
        if self._type not in _ITEM_BITS:
            raise GraphError(
                f"{self._where} has the ONNX type {self._type}; start the hub with a model of numbers and "
                "booleans only"
            )
        size, raw = math.prod(self._dims), self._raw
        if base is not None and (self._entries or self._location):
            if self._location != EXTERNAL or raw is not None:
                raise GraphError(f"{self._where} has values in two places; the graph is damaged")
            raw = self._bytes_in(base)
        if raw is None:
            sound = size <= self._held
        else:
            sound = raw == (size * _ITEM_BITS[self._type] + 7) // 8 and not self._held
        if not sound or any(dim >= 1 << 63 for dim in self._dims):
            raise GraphError(f"{self._where}: the number of values does not match its shape; the graph is damaged")

    def _bytes_in(self, base: Base) -> int:
        """Return the number of bytes that the tensor reads from its base."""
        found = dict(_key_and_value(entry) for entry in self._entries)
        if len(self._entries) != _ENTRIES or found.keys() != {LOCATION, OFFSET, LENGTH}:
            raise GraphError(f"{self._where} needs one location, offset and length; the graph is damaged")
        if found[LOCATION] != base.file_name:
            raise GraphError(f"{self._where} reads another file than the hub's base; do not trust this hub")
        offset, length = self._number(found[OFFSET]), self._number(found[LENGTH])
        if offset + length > base.nbytes:
            raise GraphError(
                f"{self._where} reads {length} bytes from byte {offset} on, but the base has {base.nbytes} bytes; "
                "the graph is damaged"
            )
        return length

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
            raise GraphError(f"{self._where} has the offset or length {text!r}; the graph is damaged")
        return int(text)

    @property
    def _where(self) -> str:
        text = self._name.decode("utf-8", "replace")
        return f"tensor {(text if text.isprintable() else ascii(text))!r}"


def _key_and_value(entry: memoryview) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for number, text in fields(entry):
        assert isinstance(text, memoryview), "the screen has checked the wire types"
        texts[number] = bytes(text[:128]).decode("ascii", "replace")
    return texts[1], texts[2]
