"""The arrays of a device: the model it trains, and the one it started from or what it has learnt since."""

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.aggregation import UpdateKind
from edgeasync.protocol.codecs import Codec
from edgeasync.protocol.wire import Buffer


class DeviceModel:
    """Two flat float32 vectors, and no more: `parameters`, trained in place, and a base to compare them with.

    `adopt`, train, `encode_update`, send; then `adopt` again, or `release` first if the payload is still in
    flight.
    """

    def __init__(self, spec: ParameterSpec) -> None:
        self.parameters: Vector = np.zeros(spec.length, np.float32)
        self._base: Vector = np.zeros(spec.length, np.float32)
        self._trained_length = spec.trained_length

    def adopt(self, payload: Buffer, codec: Codec) -> None:
        """Take over the hub's model; `codec` is what `find_codec` gave for this payload.

        Raises `ProtocolError` if any value is not finite: `parameters` are then as before, but there is
        nothing to compare them with until a sound model is adopted.
        """
        for start in range(0, len(self._base), CHUNK):
            # The base's own slice serves as scratch: no further memory, and most codecs decode into place.
            chunk = self._base[start : start + CHUNK]
            chunk[:] = codec.read(payload, start, start + len(chunk), chunk)
            if not np.isfinite(chunk).all():
                raise ProtocolError("the hub's model has values that are not finite; it is not taken over")
        self.parameters[:] = self._base

    def encode_update(self, codec: Codec, kind: UpdateKind = "delta") -> Buffer:
        """Return what was learnt since `adopt`, or the whole model, encoded; call it once for each `adopt`.

        Statistics are sent as they are in either case: what a late difference is added to may have moved on.

        The base becomes the update, in place, to save a third vector. Under the identity codec the payload is
        a view of it, so neither `adopt` nor this may be called until the payload is sent, or `release` is.
        """
        learnt = self._trained_length if kind == "delta" else 0
        # Parameters that diverged are the hub's to refuse, with a count it keeps.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(self.parameters[:learnt], self._base[:learnt], out=self._base[:learnt])
        self._base[learnt:] = self.parameters[learnt:]
        return codec.encode(self._base)

    def release(self) -> None:
        """Leave the base to a payload still in flight, and take a fresh one; `adopt` must follow."""
        self._base = np.empty_like(self._base)
