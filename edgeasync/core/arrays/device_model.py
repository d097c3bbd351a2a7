"""A device's arrays: the trained model, its base and the residual."""

from collections.abc import Iterable

import numpy as np

from edgeasync.core.arrays.delta_chain import Difference, follow, is_finite
from edgeasync.core.arrays.spool import HeldModel
from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.aggregation import UpdateKind
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import (
    FLOAT16,
    Codecs,
    JoinedSources,
    SixteenBits,
    Source,
    VectorCodec,
    VectorSource,
    chunks,
)
from edgeasync.protocol.messages import ModelVersion


class DeviceModel:
    """The trained `parameters` and their base, the hub's model, as float32 vectors.

    With error feedback (Seide et al. 2014, Karimireddy et al. 2019), a third vector is the
    residual, which is the part that codecs dropped. With overlap, a fourth vector contains the
    parameters at the time of the last push.

    In each exchange, call `install` or `install_deltas`, train, and call `encode_update`. If the
    hub rejects the update, call `resolve`.
    """

    def __init__(self, spec: ParameterSpec, float16: SixteenBits = FLOAT16) -> None:
        self.codecs = Codecs(spec, float16)
        self.parameters: Vector = np.zeros(spec.length, np.float32)
        self.base: Vector = np.zeros(spec.length, np.float32)
        """The hub's model from which training started. Other objects must not change it."""
        self.version: ModelVersion | None = None
        """The version of the base. The caller of `install` sets it, and sets it to `None` while it
        installs a model.
        """
        self.checksum = 0
        """The checksum of the base."""
        self._trained_length = spec.trained_length
        self.residual: Vector | None = None
        """The part of earlier updates that codecs dropped and that has not been sent since, or
        `None`.
        """
        self._at_push: Vector | None = None
        self.overlaps = False
        """Whether training may continue on the parameters before the next model is installed."""

    def restore_residual(self, residual: Vector) -> None:
        """Restore the residual from before a restart.

        Raises `ValueError` if its length is wrong.
        """
        if residual.shape != (self._trained_length,) or residual.dtype != np.float32:
            raise ValueError(f"the residual has shape {residual.shape}, expected {self._trained_length} values")
        self.residual = residual

    def restore_base(self, held: HeldModel) -> None:
        """Restore the base from before a restart; raises `ValueError` if its length is wrong."""
        if held.values.shape != self.base.shape or held.values.dtype != np.float32:
            raise ValueError(f"the model has shape {held.values.shape}, expected {len(self.base)} values")
        self.base[:] = held.values
        self.parameters[:] = held.values
        self.version, self.checksum = held.version, held.checksum

    # -- installing the hub's model --------------------------------------------------------------------------

    def install(self, source: Source) -> None:
        """Install the hub's whole model as the new base.

        Raises `ProtocolError` if a value is not finite. In this case, `parameters` are unchanged,
        but have no base until another model is installed.
        """
        for start in range(0, len(self.base), CHUNK):
            # With the base's own slice as scratch, most codecs decode in place.
            chunk = self.base[start : start + CHUNK]
            chunk[:] = source.read(start, start + len(chunk), chunk)
        self.checksum = wire.checksum(self.base.data.cast("B"))
        self._start_from_base()

    def install_deltas(self, steps: Iterable[Source], rounding: VectorCodec, checksum: int) -> None:
        """Install a new base by adding the hub's deltas to the old base.

        Raises `ProtocolError` for the same reasons as `install`, and if the new base does not have
        the checksum `checksum`.
        """
        follow(self.base, steps, rounding, self._trained_length, self.base)
        if wire.checksum(self.base.data.cast("B")) != checksum:
            raise ProtocolError("the deltas do not fit this device's model; the device fetches the whole model")
        self.checksum = checksum
        self._start_from_base()

    def _start_from_base(self) -> None:
        if not is_finite(VectorSource(self.base)):
            raise ProtocolError("the hub's model has values that are not finite; the device rejects it")
        if self.overlaps and self._at_push is not None:
            self._rebase(self._at_push)
        else:
            self.parameters[:] = self.base

    def _rebase(self, at_push: Vector) -> None:
        """Add the training since the last push to the new base: w_new + (x - x_at_push)."""
        parameters = self.parameters
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(parameters, at_push, out=parameters)
            np.add(parameters, self.base, out=parameters)
        if not is_finite(VectorSource(parameters)):
            parameters[:] = self.base  # training had diverged
        at_push[:] = self.base  # another model may arrive before the next step

    # -- making an update ------------------------------------------------------------------------------------

    def encode_update(
        self,
        codec: VectorCodec,
        kind: UpdateKind = "delta",
        *,
        feedback: bool | None = False,
        overlap: bool = False,
        random: np.random.Generator | None = None,
    ) -> wire.Buffer:
        """Encode the difference from the base or, if `kind` is "model", the whole model.

        Statistics are always sent as plain values, because the hub would add a difference to a
        value that may have changed in the meantime. With `feedback`, a delta includes the residual,
        and the part that the codec drops becomes the new residual. If `feedback` is `None`, this
        happens only if an earlier codec left a residual. With `overlap`, the caller may continue to
        train before it installs the next model.
        """
        self.overlaps = overlap
        if overlap:
            if self._at_push is None:
                self._at_push = np.empty_like(self.parameters)
            self._at_push[:] = self.parameters
        learnt = Difference(self.parameters, self.base, self._trained_length if kind == "delta" else 0)
        if kind == "model" or feedback is False or (feedback is None and self.residual is None):
            self.residual = None
            return codec.encode(learnt, random)
        if self.residual is None:
            self.residual = np.zeros(self._trained_length, np.float32)
        self._accumulate(learnt, np.add)
        statistics = self.parameters[self._trained_length :]
        payload = codec.encode(JoinedSources(VectorSource(self.residual), VectorSource(statistics)), random)
        self._accumulate(codec.open(payload), np.subtract)
        return payload

    def begin_overlap(self) -> None:
        """Allow overlap after an update was encoded without it.

        Call this before any further training.
        """
        if not self.overlaps:
            self.overlaps, self._at_push = True, self.parameters.copy()

    def resolve(self, codec: VectorCodec, payload: wire.Buffer, decay: float | None) -> None:
        """Undo the effect of a rejected update on the residual, then scale the residual by `decay`.

        If `decay` is `None`, drop the residual and all training since the update. Call this before
        the next model is installed.
        """
        if decay is None:
            self.overlaps = False
            self.residual = None
        if self.residual is None:
            return
        assert decay is not None
        # residual_before = residual_after + coded - learnt, up to rounding, so no copy is needed.
        self._accumulate(codec.open(payload), np.add)
        parameters = self.parameters if self._at_push is None or not self.overlaps else self._at_push
        self._accumulate(Difference(parameters, self.base, self._trained_length), np.subtract)
        self.decay_residual(decay)
        if not is_finite(VectorSource(self.residual)):
            self.residual = None  # training had diverged

    def decay_residual(self, factor: float) -> None:
        """Scale the residual by `factor`."""
        if self.residual is not None and factor != 1.0:
            np.multiply(self.residual, np.float32(factor), out=self.residual)

    def _accumulate(self, source: Source, operation: np.ufunc) -> None:
        """Add a source to the residual, or subtract the source from it."""
        assert self.residual is not None
        with np.errstate(over="ignore", invalid="ignore"):
            for start, values in chunks(source, self._trained_length):
                chunk = self.residual[start : start + values.size]
                operation(chunk, values, out=chunk)
