"""Converts large vectors to half precision and back by onnxruntime, with the same bits as numpy."""

import logging
import math
import sys
from functools import cached_property

import numpy as np

from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.dense import SixteenBits
from edgeasync.protocol.codecs.float16 import Halves, narrow_float16, round_float16, widen_float16

LENGTH_MIN = 1 << 13
"""Shorter vectors are converted by numpy, because a call of onnxruntime takes about 15 us."""

_GRAPH = (
    "08083a400a170a01781201792204436173742a090a02746f18{to}a001021201675a100a0178120b0a0908{of}"
    "12050a0312016e62100a0179120b0a0908{to}12050a0312016e42040a001011"
)
"""The serialized model `y = Cast(x)`, with the types of `x` and `y` to be filled in."""

_FLOAT32, _FLOAT16 = 1, 10
"""The numbers of these types in ONNX."""

_log = logging.getLogger(__name__)


class _Cast:
    """An onnxruntime session that casts between two vectors of equal length."""

    def __init__(self, of: int, to: int) -> None:
        import onnxruntime  # noqa: PLC0415 - agents with numpy models must not import it

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        graph = bytes.fromhex(_GRAPH.format(of=f"{of:02x}", to=f"{to:02x}"))
        self._session = onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self._of, self._to = of, to

    def __call__(self, values: Vector | Halves, out: Vector | Halves) -> None:
        """Cast `values` into the memory of `out`. Both must be contiguous."""
        binding = self._session.io_binding()  # not shared, because several threads may cast at a time
        binding.bind_input("x", "cpu", 0, self._of, values.shape, values.ctypes.data)
        binding.bind_output("y", "cpu", 0, self._to, out.shape, out.ctypes.data)
        self._session.run_with_iobinding(binding)


class Float16Casts:
    """Conversions to and from half precision for the stage `float16`, in any thread.

    They use onnxruntime if the process has imported it. Importing it for them alone would cost more
    than 30 MB.
    """

    @property
    def stage(self) -> SixteenBits:
        """The stage `float16` with these conversions."""
        return SixteenBits(self.narrow, self.widen, round_float16)

    def narrow(self, values: Vector, out: Halves) -> None:
        """Do the same as `narrow_float16`."""
        casts = self._find(values, out)
        if casts is None or not _is_finite(values):  # onnxruntime changes the payloads of NaNs
            narrow_float16(values, out)
        else:
            casts[0](values, out)

    def widen(self, halves: Halves, out: Vector) -> None:
        """Do the same as `widen_float16`."""
        casts = self._find(halves, out)
        if casts is not None:
            casts[1](halves, out)
        if casts is None or not _is_finite(out):
            widen_float16(halves, out)

    def _find(self, values: Vector | Halves, out: Vector | Halves) -> tuple[_Cast, _Cast] | None:
        if values.size < LENGTH_MIN or "onnxruntime" not in sys.modules:
            return None
        # A part of a received message may have any address.
        return self._casts if values.flags.aligned and out.flags.aligned else None

    @cached_property
    def _casts(self) -> tuple[_Cast, _Cast] | None:
        """The casts to half precision and back, or `None` if they are missing or compute other bits."""
        try:
            casts = _Cast(_FLOAT32, _FLOAT16), _Cast(_FLOAT16, _FLOAT32)
            fits = _computes_same_bits(*casts)
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no common class
            _log.warning("onnxruntime cannot convert float16 (%s); numpy does it more slowly", error)
            return None
        if not fits:
            _log.warning("onnxruntime rounds float16 differently here; numpy does it more slowly")
        return casts if fits else None


def _is_finite(values: Vector) -> bool:
    """Return false if any value is not finite, or if the sum of the squares overflows."""
    return math.isfinite(np.vdot(values, values))


def _computes_same_bits(narrow: _Cast, widen: _Cast) -> bool:
    """Compare two casts with numpy's conversions.

    The values are all finite halves, the midpoints between them, and the numbers next to both.
    """
    halves = np.arange(0x7C00, dtype=np.uint16)
    wide, expected_wide = np.empty((2, halves.size), np.float32)
    widen(halves, wide)
    widen_float16(halves, expected_wide)
    midpoints = (expected_wide[:-1] + expected_wide[1:]) / 2
    bits = np.concatenate([expected_wide, midpoints, np.array([65520.0, 1e30], np.float32)]).view(np.uint32)
    bits = np.concatenate([bits, bits + 1, bits[1:] - 1], dtype=np.uint32)
    values = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    found, expected = np.empty((2, values.size), np.uint16)
    narrow(values, found)
    narrow_float16(values, expected)
    return np.array_equal(wide, expected_wide) and np.array_equal(found, expected)
