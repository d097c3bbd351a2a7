"""Codec plugins: stages that installed packages provide as entry points of `edgeasync.codecs`.

Hub and device both need the package. A peer can only select code that is installed under the name
it sends. If that code fails to decode a peer's bytes, the update is refused.
"""

import logging
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from edgeasync.errors import PluginError, ProtocolError
from edgeasync.parameters import Vector
from edgeasync.plugins import CODECS, Codec, installed, load_class, name_of
from edgeasync.protocol.codecs.codec import Dense
from edgeasync.protocol.codecs.source import Bytes, Source, VectorSource, copy_range

TRIED = (1, 2, 100, 1000)
"""Numbers of values with which a plugin is tested when it is loaded."""

OVERHEAD_BYTES_MAX = 32
"""Maximum number of bytes that a plugin may return in addition to four per value."""

_log = logging.getLogger(__name__)


class PluginStage:
    """A dense stage that calls a plugin.

    The first byte of the payload states whether all values are finite. The plugin's bytes follow
    it.
    """

    elementwise: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def __init__(self, name: str, codec: Codec) -> None:
        self.needs_feedback = bool(codec.needs_feedback)
        self._codec = codec
        self._who = f"codec {name} ({name_of(type(codec))})"

    def nbytes(self, length: int) -> int:
        """Return the plugin's number of bytes plus one."""
        return 1 + self._codec.nbytes(length)

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Encode finite values; raises `PluginError` if the plugin raises or returns invalid bytes.

        If there are no values, the plugin is not called, for example when `top_k` encodes an
        all-zero update.
        """
        values = np.empty(length, np.float32)
        copy_range(values, source)
        out[:] = 0
        out[0] = finite = bool(np.isfinite(values).all())
        if not finite or not length:
            return
        try:
            coded = np.frombuffer(self._codec.encode(values), np.uint8)
        except Exception as error:
            raise self.wrong(f"encode raised {type(error).__name__}: {error}") from error
        if coded.size != out.size - 1:
            raise self.wrong(
                f"encode returned {coded.size} bytes for {length} values, but nbytes returned {out.size - 1}"
            )
        out[1:] = coded

    def open(self, coded: Bytes, length: int) -> Source:
        """Decode the plugin's bytes; raises `ProtocolError` if the plugin cannot decode them."""
        if coded[0] != 1:
            return VectorSource(np.full(length, np.nan, np.float32))
        if not length:
            return VectorSource(np.empty(0, np.float32))
        try:
            values: Any = self._codec.decode(coded[1:], length)
            values = np.array(values, np.float32)
        except Exception as error:
            raise ProtocolError(f"{self._who} cannot read a payload: {error}"[:300]) from error
        if values.shape != (length,):
            raise ProtocolError(f"{self._who} decoded an array of shape {values.shape}, expected ({length},)")
        return VectorSource(values)

    def wrong(self, what: str) -> PluginError:
        """Return a `PluginError` about the plugin."""
        return PluginError(f"{self._who}: {what}")

    def trial(self) -> None:
        """Encode some artificial vectors twice; raises `PluginError` if the results are invalid."""
        before = 0
        for length in TRIED:
            values: Vector = np.linspace(-1.0, 1.0, length, dtype=np.float32)
            nbytes = self._codec.nbytes(length)
            if not isinstance(nbytes, int) or not before <= nbytes <= 4 * length + OVERHEAD_BYTES_MAX:
                raise self.wrong(
                    f"nbytes({length}) is {nbytes!r}; return at most 4 bytes per value plus {OVERHEAD_BYTES_MAX}"
                )
            before = nbytes
            seen = []
            for _ in range(2):
                out = np.empty(1 + nbytes, np.uint8)
                self.encode(VectorSource(values), length, out, None)
                try:
                    decoded = self.open(out, length).read(0, length, np.empty(length, np.float32))
                except ProtocolError as error:
                    raise self.wrong(f"decode cannot read what encode wrote: {error}") from error
                seen.append((out.tobytes(), decoded.tobytes()))
            if seen[0] != seen[1]:
                raise self.wrong("encodes equal values differently; it must depend on its arguments alone")
            if not np.isfinite(decoded).all():
                raise self.wrong("decodes finite values to non-finite ones; return finite values")


@lru_cache(maxsize=32)
def plugin_stage(name: str) -> Dense | None:
    """Return the tested stage that an installed package provides under this name, or `None`.

    Raises `PluginError` if the stage cannot be used.
    """
    point = installed(CODECS).get(name)
    if point is None:
        return None
    made = load_class(point.value)
    missing = [each for each in ("needs_feedback", "nbytes", "encode", "decode") if not hasattr(made, each)]
    if missing:
        raise PluginError(f"codec {name} ({point.value}): missing {', '.join(missing)}; see docs/train/plugins.md")
    try:
        stage = PluginStage(name, made())
    except Exception as error:
        raise PluginError(f"codec {name} ({point.value}): cannot be created without arguments: {error}") from error
    stage.trial()
    return stage


def plugin_stages() -> tuple[str, ...]:
    """Return the names of all usable codecs that installed packages provide."""
    usable = []
    for name in sorted(installed(CODECS)):
        try:
            plugin_stage(name)
        except PluginError as error:
            _log.warning("%s; this codec is ignored", error)
        else:
            usable.append(name)
    return tuple(usable)
