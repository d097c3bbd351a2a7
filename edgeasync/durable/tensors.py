"""Read and write named arrays in the safetensors format, as views of memory without copying.

A file consists of the length of the header as a little-endian u64, a JSON header, and the memory of
the arrays in sequence. The header contains each array's dtype, shape and offsets, and is padded
with spaces to a multiple of 8 bytes. https://huggingface.co/docs/safetensors/index#format
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.protocol.wire import Buffer
from edgeasync.structs import parse_json

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


class _Place(msgspec.Struct):
    """The offsets at which an array starts and ends, in bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_read_place = msgspec.json.Decoder(_Place).decode


def tensor_parts(
    tensors: Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.uint8]], metadata: dict[str, str] | None = None
) -> list[memoryview]:
    """Return the parts of a safetensors file: the header, and the memory of each array as bytes.

    Arrays are ordered by dtype and name, so that float32 arrays are aligned wherever the file is
    loaded. Arrays that are not C-contiguous are copied. Raises `ValueError` for an array that is
    neither float32 nor uint8.
    """
    places, parts, start = {}, [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or name == _METADATA:
            raise ValueError(f"array {name!r} has dtype {tensor.dtype}; only float32 and uint8 can be stored")
        part = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        places[name] = _Place(_NAMES[tensor.dtype], tensor.shape, (start, start + part.nbytes))
        parts.append(part)
        start += part.nbytes
    header = msgspec.json.encode(places if metadata is None else {_METADATA: metadata} | places)
    header += b" " * (-len(header) % 8)
    return [memoryview(_LENGTH.pack(len(header)) + header), *parts]


def read_tensors(content: Buffer) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.uint8]]:
    """Return the arrays of a safetensors file as views of its content; raises `ValueError`."""
    if len(content) < _LENGTH.size:
        raise ValueError("shorter than a header")
    data = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    try:
        places = parse_json(memoryview(content)[_LENGTH.size : data], dict[str, msgspec.Raw])
        places.pop(_METADATA, None)
        return {name: _view(content, data, _read_place(raw)) for name, raw in places.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"damaged header: {error}") from error


def _view(content: Buffer, data: int, place: _Place) -> npt.NDArray[np.float32] | npt.NDArray[np.uint8]:
    """Return an array as a view of `content`. `data` is the offset of the first array."""
    dtype = _DTYPES.get(place.dtype)
    if dtype is None or min(place.shape, default=0) < 0:
        raise ValueError(f"unsupported array of dtype {place.dtype} and shape {place.shape}")
    count, (start, end) = math.prod(place.shape), place.data_offsets
    if not 0 <= start <= end <= len(content) - data or end - start != count * dtype.itemsize:
        raise ValueError(f"an array of shape {place.shape} does not fit at bytes {start} to {end}")
    return np.frombuffer(content, dtype, count, data + start).reshape(place.shape)
