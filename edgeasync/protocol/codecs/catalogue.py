"""The names of codecs, and the codecs that they select.

A name has at most 64 characters and consists of stages joined by `+`. The first stage is a dense
stage (`identity`, `float16`, `bfloat16`, `int8`, `int4`, `sign`) or `top_k(fraction)`. `top_k` may
be followed by a dense stage that encodes the values it keeps; without one, they are sent as
float32. The last stage may be `zstd`. A dense stage may also be the codec of an installed package.
`int8(stochastic)` and `int4(stochastic)` differ from `int8` and `int4` only in the encoder.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from edgeasync.errors import PluginError, ProtocolError
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.codecs.blocks import Int4, Int8, Sign
from edgeasync.protocol.codecs.codec import Dense, VectorCodec
from edgeasync.protocol.codecs.compressed import HAS_ZSTD, Compressed, compressed_bytes_max
from edgeasync.protocol.codecs.dense import BFLOAT16, FLOAT16, DenseCodec, Identity, SixteenBits
from edgeasync.protocol.codecs.plugin import plugin_stage, plugin_stages
from edgeasync.protocol.codecs.top_k import TopKCodec

NAME_LENGTH_MAX = 64

STAGES_MAX = 32
"""Maximum number of stages that a hello may list."""

_DENSE: dict[str, Dense] = {
    "identity": Identity(),
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "int8": Int8(),
    "int8(stochastic)": Int8(stochastic=True),
    "int4": Int4(),
    "int4(stochastic)": Int4(stochastic=True),
    "sign": Sign(),
}

STAGES: tuple[str, ...] = (
    *("identity", "float16", "bfloat16", "int8", "int4", "top_k", "sign"),
    *(("zstd",) if HAS_ZSTD else ()),
)
"""The stages that this side can decode; a device lists its own when it joins."""

ELEMENTWISE = tuple(name for name, stage in _DENSE.items() if stage.elementwise)
"""The codecs that may encode whole models."""

_KNOWN = (
    "identity, float16, bfloat16, int8, int8(stochastic), int4, int4(stochastic), sign, top_k(0.01); "
    "the last may be followed by one of the others, as in top_k(0.01)+int8, and any by +zstd"
)
_TOP_K = re.compile(r"top_k\((0\.[0-9]{1,9})\)", re.ASCII)
_PLUGIN = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)


class _Design(NamedTuple):
    """The parts of a codec's name, independent of a spec."""

    fraction: float
    """The argument of `top_k`, or 0 without `top_k`."""
    dense: str
    compressed: bool

    @property
    def name(self) -> str:
        """The canonical name."""
        first = f"top_k({_decimal(self.fraction)})" if self.fraction else ""
        dense = "" if first and self.dense == "identity" else self.dense
        return "+".join(part for part in (first, dense, "zstd" if self.compressed else "") if part)


def _decimal(fraction: float) -> str:
    return f"{fraction:.9f}".rstrip("0")


def _parse(name: str) -> _Design:
    """Parse a name; raises `ValueError`, which lists the known names."""
    parts = name.split("+") if len(name) <= NAME_LENGTH_MAX else []
    compressed = len(parts) > 1 and parts[-1] == "zstd"
    if compressed:
        parts.pop()
    fraction = float(match[1]) if parts and (match := _TOP_K.fullmatch(parts[0])) else 0.0
    rest = parts[1:] if fraction else parts
    dense = rest[0] if rest else "identity"
    if not parts or not _is_dense(dense) or len(rest) > 1 or fraction > 0.5:
        raise ValueError(f"unknown codec {name[:NAME_LENGTH_MAX]!r}; known: {_KNOWN}")
    if compressed and not HAS_ZSTD:
        raise ValueError(f"codec {name!r} needs the zstandard package; run pip install 'edgeasync[zstd]'")
    return _Design(fraction, dense, compressed)


def _is_dense(name: str) -> bool:
    return name in _DENSE or (_PLUGIN.fullmatch(name) is not None and plugin_stage(name) is not None)


def plugin_parts(name: str) -> list[str]:
    """Return the parts of a codec's name that are not built in, without importing a plugin."""
    own = (*_DENSE, "zstd", "auto", "off")
    return [part for part in name.split("+") if part not in own and _PLUGIN.fullmatch(part)]


def known_stages() -> tuple[str, ...]:
    """Return the stages that this machine can decode, including those of installed packages."""
    return (STAGES + plugin_stages())[:STAGES_MAX]


class Codecs:
    """Makes the codecs for vectors of one spec.

    `float16` is the stage to use under that name. It computes the same bits as the built-in stage,
    but may be faster.
    """

    def __init__(self, spec: ParameterSpec, float16: SixteenBits = FLOAT16) -> None:
        self._spec = spec
        self._float16 = float16

    def make(self, name: str) -> VectorCodec:
        """Do the same as `make_codec`."""
        return make_codec(name, self._spec, self._float16)

    def find(self, name: str, payload_bytes: int) -> VectorCodec:
        """Do the same as `find_codec`."""
        return find_codec(name, payload_bytes, self._spec, self._float16)


def make_codec(name: str, spec: ParameterSpec, float16: SixteenBits = FLOAT16) -> VectorCodec:
    """Return the codec with that name for vectors of `spec`.

    Raises `ValueError`, which lists the known names, for an unknown or invalid name.
    """
    return _make(name, spec, float16)


@lru_cache(maxsize=128)
def _make(name: str, spec: ParameterSpec, float16: SixteenBits) -> VectorCodec:
    design = _parse(name)
    dense = float16 if design.dense == "float16" else _DENSE.get(design.dense) or plugin_stage(design.dense)
    assert dense is not None
    plain = _Design(design.fraction, design.dense, compressed=False).name
    codec = TopKCodec(plain, spec, design.fraction, dense) if design.fraction else DenseCodec(plain, spec, dense)
    return Compressed(codec) if design.compressed else codec


def find_codec(name: str, payload_bytes: int, spec: ParameterSpec, float16: SixteenBits = FLOAT16) -> VectorCodec:
    """Return the codec that a message names, and check the length of its payload.

    Raises `ProtocolError` if the codec is unknown, or if no payload of this codec has that length.
    """
    try:
        codec = make_codec(name, spec, float16)
    except (ValueError, PluginError) as error:
        raise ProtocolError(str(error)) from error
    codec.check_length(payload_bytes)
    return codec


def check_codec_name(name: str) -> None:
    """Raise `ValueError`, which lists the known names, for an unknown codec."""
    _parse(name)


def stages_of(name: str) -> frozenset[str]:
    """Return the stages, without arguments, that a peer needs to decode payloads of this codec.

    Raises `ValueError` as `check_codec_name` does.
    """
    design = _parse(name)
    found = {design.dense.partition("(")[0]}
    if design.fraction:
        found.add("top_k")
    return frozenset(found | {"zstd"} if design.compressed else found)


def payload_bytes_limit(spec: ParameterSpec) -> int:
    """Return the maximum size of a payload of any codec, slightly more than the vector as float32."""
    return compressed_bytes_max(4 * spec.length + 64)
