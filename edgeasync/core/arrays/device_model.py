"""The arrays of a device: the model it trains, its base as the hub assigned it, and what codecs dropped so far."""

from collections.abc import Iterable

import numpy as np

from edgeasync.core.arrays.delta_chain import Difference, follow, is_finite
from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.aggregation import UpdateKind
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import Codec, Joined, Source, VectorSource
from edgeasync.protocol.messages import ModelVersion


class DeviceModel:
    """Two flat float32 vectors: `parameters`, trained in place, and their base, the hub's model as assigned.

    A third, the residual, is made when a codec drops so much that the device must carry it over (error feedback:
    Seide et al. 2014, Karimireddy et al. 2019); a fourth when training overlaps the exchange.

    One exchange is `install` or `install_deltas`, training, `encode_update`, and `resolve` for an update that will
    never count.
    """

    def __init__(self, spec: ParameterSpec) -> None:
        self.parameters: Vector = np.zeros(spec.length, np.float32)
        self._base: Vector = np.zeros(spec.length, np.float32)
        self.version: ModelVersion | None = None
        """Of the base. The caller of `install` sets it; `None` while a model is being installed."""
        self._trained_length = spec.trained_length
        self._residual: Vector | None = None
        self._at_push: Vector | None = None
        self._overlap = False

    @property
    def residual(self) -> Vector | None:
        """What codecs dropped so far and no update has carried yet; `None` if nothing is carried over."""
        return self._residual

    def restore_residual(self, residual: Vector) -> None:
        """Carry over what was dropped before this start; raises `ValueError` for a vector of another length."""
        if residual.shape != (self._trained_length,) or residual.dtype != np.float32:
            raise ValueError(f"a residual of {residual.shape} is not one of {self._trained_length} values")
        self._residual = residual

    # -- the hub's model comes in ----------------------------------------------------------------------------

    def install(self, source: Source) -> None:
        """Make the hub's whole model the new base.

        Raises `ProtocolError` if a value is not finite: `parameters` are then as before, but they have no base
        until another model is installed.
        """
        for start in range(0, len(self._base), CHUNK):
            # The base's own slice serves as scratch: most codecs decode into place.
            chunk = self._base[start : start + CHUNK]
            chunk[:] = source.read(start, start + len(chunk), chunk)
        self._start_from_base()

    def install_deltas(self, steps: Iterable[Source], rounding: Codec, checksum: int) -> None:
        """Make the new base from the old one and the hub's deltas; raises `ProtocolError` as `install` does.

        It is also raised if the new base does not have its `checksum`.
        """
        follow(self._base, steps, rounding, self._trained_length, self._base)
        if wire.checksum(self._base.data.cast("B")) != checksum:
            raise ProtocolError("the model held is not the one the hub believes it to be; it is fetched anew")
        self._start_from_base()

    def _start_from_base(self) -> None:
        if not is_finite(VectorSource(self._base)):
            raise ProtocolError("the hub's model has values that are not finite; it is not taken over")
        if self._overlap and self._at_push is not None:
            self._rebase(self._at_push)
        else:
            self.parameters[:] = self._base

    def _rebase(self, at_push: Vector) -> None:
        """Keep what was learnt since the last update was made: x <- w_new + (x - x_at_push)."""
        parameters = self.parameters
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(parameters, at_push, out=parameters)
            np.add(parameters, self._base, out=parameters)
        if not is_finite(VectorSource(parameters)):
            parameters[:] = self._base  # it had diverged
        at_push[:] = self._base  # should another model come before the next step

    # -- an update goes out ----------------------------------------------------------------------------------

    def encode_update(
        self,
        codec: Codec,
        kind: UpdateKind = "delta",
        *,
        feedback: bool | None = False,
        overlap: bool = False,
        random: np.random.Generator | None = None,
    ) -> wire.Buffer:
        """Return what was learnt from the base, or the whole model, encoded.

        Statistics are sent as they are in either case: the value that a late difference is added to may have
        moved. With `feedback` a delta also carries what earlier payloads dropped, and what this one drops is kept;
        with `None` only while a residual of an earlier codec is left. With `overlap` the parameters may be trained
        further before the next model is installed.
        """
        self._overlap = overlap
        if overlap:
            if self._at_push is None:
                self._at_push = np.empty_like(self.parameters)
            self._at_push[:] = self.parameters
        learnt = Difference(self.parameters, self._base, self._trained_length if kind == "delta" else 0)
        if kind == "model" or feedback is False or (feedback is None and self._residual is None):
            self._residual = None
            return codec.encode(learnt, random)
        if self._residual is None:
            self._residual = np.zeros(self._trained_length, np.float32)
        self._accumulate(learnt, np.add)
        statistics = self.parameters[self._trained_length :]
        payload = codec.encode(Joined(VectorSource(self._residual), VectorSource(statistics)), random)
        self._accumulate(codec.open(payload), np.subtract)
        return payload

    def resolve(self, codec: Codec, payload: wire.Buffer, decay: float | None) -> None:
        """Undo what an update that will never count did to the residual, and scale the old one by `decay`.

        `decay=None` drops the residual and everything learnt since: the update was not finite. Call it before the
        next model is installed.
        """
        if decay is None:
            self._overlap = False
            self._residual = None
        if self._residual is None:
            return
        assert decay is not None
        # residual_before = residual_after + coded - learnt, up to rounding: it need not be kept.
        self._accumulate(codec.open(payload), np.add)
        parameters = self.parameters if self._at_push is None or not self._overlap else self._at_push
        self._accumulate(Difference(parameters, self._base, self._trained_length), np.subtract)
        self.decay_residual(decay)
        if not is_finite(VectorSource(self._residual)):
            self._residual = None  # the update had diverged, whatever it was refused for

    def decay_residual(self, factor: float) -> None:
        """Let only a share of the residual be left."""
        if self._residual is not None and factor != 1.0:
            np.multiply(self._residual, np.float32(factor), out=self._residual)

    def _accumulate(self, source: Source, operation: np.ufunc) -> None:
        """Add a source to the residual, or subtract it."""
        assert self._residual is not None
        scratch = np.empty(min(CHUNK, len(self.parameters)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, self._trained_length, CHUNK):
                stop = min(start + CHUNK, self._trained_length)
                chunk = self._residual[start:stop]
                operation(chunk, source.read(start, stop, scratch), out=chunk)
