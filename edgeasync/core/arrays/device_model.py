"""The arrays of a device: the model it trains, the hub's as it was assigned, and what codecs dropped so far."""

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
    """Two flat float32 vectors: `parameters`, trained in place, and the hub's model they were trained from.

    A third, the residual, is made when a codec drops so much that the device must carry it over (error feedback:
    Seide et al. 2014, Karimireddy et al. 2019); a fourth when training goes on while an update is under way.

    `adopt` or `lead_on`, train, `encode_update`, and `settle` what became of it; then over again.
    """

    def __init__(self, spec: ParameterSpec) -> None:
        self.parameters: Vector = np.zeros(spec.length, np.float32)
        self._held: Vector = np.zeros(spec.length, np.float32)
        self.version: ModelVersion | None = None
        """Of the hub's model, for whoever takes it in to note; not while one is coming in."""
        self._trained_length = spec.trained_length
        self._residual: Vector | None = None
        self._at_push: Vector | None = None
        self._going_on = False

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

    def adopt(self, source: Source) -> None:
        """Take over the hub's whole model.

        Raises `ProtocolError` if any value is not finite: `parameters` are then as before, but there is
        nothing to compare them with until a sound model is adopted.
        """
        for start in range(0, len(self._held), CHUNK):
            # The held model's own slice serves as scratch: most codecs decode into place.
            chunk = self._held[start : start + CHUNK]
            chunk[:] = source.read(start, start + len(chunk), chunk)
        self._take_over()

    def lead_on(self, steps: Iterable[Source], rounding: Codec, checksum: int) -> None:
        """Follow the hub's published chain from the version held; raises `ProtocolError` as `adopt` does.

        It is also raised if the model does not have its `checksum` in the end.
        """
        follow(self._held, steps, rounding, self._trained_length, self._held)
        if wire.checksum(self._held.data.cast("B")) != checksum:
            raise ProtocolError("the model held is not the one the hub believes it to be; it is fetched anew")
        self._take_over()

    def _take_over(self) -> None:
        if not is_finite(VectorSource(self._held)):
            raise ProtocolError("the hub's model has values that are not finite; it is not taken over")
        if self._going_on and self._at_push is not None:
            self._go_on(self._at_push)
        else:
            self.parameters[:] = self._held

    def _go_on(self, at_push: Vector) -> None:
        """Keep what was learnt since the last update was made: x <- w_new + (x - x_at_push)."""
        parameters = self.parameters
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(parameters, at_push, out=parameters)
            np.add(parameters, self._held, out=parameters)
        if not is_finite(VectorSource(parameters)):
            parameters[:] = self._held  # it had diverged
        at_push[:] = self._held  # should another model come before the next step

    # -- an update goes out ----------------------------------------------------------------------------------

    def encode_update(
        self,
        codec: Codec,
        kind: UpdateKind = "delta",
        *,
        feedback: bool | None = False,
        going_on: bool = False,
        random: np.random.Generator | None = None,
    ) -> wire.Buffer:
        """Return what was learnt since the last model came in, or the whole model, encoded.

        Statistics are sent as they are in either case: what a late difference is added to may have moved on.
        With `feedback` what earlier payloads dropped is added to a delta, and what this one drops is kept; with
        `None` so long as something is left of an earlier codec. With `going_on` the parameters may be trained on
        before the next model comes in.
        """
        self._going_on = going_on
        if going_on:
            if self._at_push is None:
                self._at_push = np.empty_like(self.parameters)
            self._at_push[:] = self.parameters
        learnt = Difference(self.parameters, self._held, self._trained_length if kind == "delta" else 0)
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

    def settle(self, codec: Codec, payload: wire.Buffer, decay: float | None) -> None:
        """Take back what an update made of the residual, for it will never count; `decay` is left of the old one.

        With `None` nothing is: the update was not finite, and what was learnt since is dropped with it. Call it
        before the next model comes in.
        """
        if decay is None:
            self._going_on = False
            self._residual = None
        if self._residual is None:
            return
        assert decay is not None
        # residual_before = residual_after + coded - learnt, up to rounding: it need not be kept.
        self._accumulate(codec.open(payload), np.add)
        parameters = self.parameters if self._at_push is None or not self._going_on else self._at_push
        self._accumulate(Difference(parameters, self._held, self._trained_length), np.subtract)
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
