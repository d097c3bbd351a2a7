"""float16 conversion by onnxruntime, against numpy's."""

import subprocess
import sys

import numpy as np
import onnxruntime  # noqa: F401 - the casts are used only if it is imported
import pytest

from edgeasync.protocol.codecs import Codecs, VectorSource, make_codec
from edgeasync.protocol.codecs.float16 import narrow_float16, widen_float16
from edgeasync.training import float16_casts
from edgeasync.training.float16_casts import LENGTH_MIN, Float16Casts
from tests.support.codecs.codecs import flat

CASTS = Float16Casts()
SPECIAL = np.array(
    [
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FBFFFFF, 0xFF801000),
        *(0x7F7FFFFF, 0x477FF000),
    ],
    np.uint32,
)


def narrowed(vector):
    """Return the halves of a vector, which numpy finds as well."""
    found, expected = np.empty((2, vector.size), np.uint16)
    CASTS.narrow(vector, found)
    narrow_float16(vector, expected)
    np.testing.assert_array_equal(found, expected)
    return found


def test_the_casts_are_used():
    assert CASTS._casts is not None


@pytest.mark.parametrize("start", range(0, 2**32, 2**29))
def test_numbers_are_narrowed_to_the_same_bits(start):
    narrowed(np.arange(start, start + 2**29, 9973, dtype=np.uint32).view(np.float32))


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("place", [0, LENGTH_MIN // 2, LENGTH_MIN - 1])
def test_one_special_value_is_narrowed_to_the_same_bits(special, place):
    vector = np.linspace(-1e-4, 1e-4, LENGTH_MIN, dtype=np.float32)
    vector.view(np.uint32)[place] = special
    narrowed(vector)


@pytest.mark.parametrize("kinds", [range(65536), [i for i in range(65536) if i & 0x7C00 != 0x7C00]])
def test_halves_are_widened_to_the_same_bits(kinds):
    halves = np.array(kinds, np.uint16)
    found, expected = np.empty((2, halves.size), np.float32)
    CASTS.widen(halves, found)
    widen_float16(halves, expected)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("length", [1, LENGTH_MIN - 1, LENGTH_MIN, 200_001])
def test_payloads_are_the_same_wherever_they_lie(length):
    vector = np.random.Generator(np.random.PCG64(length)).standard_normal(length).astype(np.float32)
    spec = flat(length, statistics=3)
    vector = np.concatenate([vector, np.ones(3, np.float32)])
    plain, fast = make_codec("float16", spec), Codecs(spec, CASTS.stage).make("float16")
    payload = bytes(fast.encode(VectorSource(vector)))
    assert payload == bytes(plain.encode(VectorSource(vector)))
    rounded = vector[:length].copy()
    fast.round_in_place(rounded)
    odd = memoryview(b"x" + payload)[1:]
    for found in (payload, odd):
        decoded = fast.open(found).read(0, spec.length, np.empty(spec.length, np.float32))
        np.testing.assert_array_equal(decoded[:length], rounded)
        np.testing.assert_array_equal(decoded, plain.open(found).read(0, spec.length, np.empty_like(decoded)))


@pytest.mark.parametrize("fault", ["narrow", "widen", "raise"])
def test_other_bits_and_failures_leave_it_to_numpy(monkeypatch, fault, caplog):
    class Cast(float16_casts._Cast):
        def __call__(self, values, out):
            if fault == "raise":
                raise RuntimeError("no kernel")
            super().__call__(values, out)
            if (out.dtype == np.uint16) == (fault == "narrow"):
                out[1] = 0.0  # a subnormal half

    monkeypatch.setattr(float16_casts, "_Cast", Cast)
    casts, vector = Float16Casts(), np.full(LENGTH_MIN, 2.0**-24, np.float32)
    halves, wide = np.empty(LENGTH_MIN, np.uint16), np.empty(LENGTH_MIN, np.float32)
    casts.narrow(vector, halves)
    casts.widen(halves, wide)
    assert (halves == 1).all()
    assert (wide == vector).all()
    assert "numpy does it more slowly" in caplog.text


PROGRAM = """
import sys, numpy as np
from edgeasync.training.float16_casts import Float16Casts
Float16Casts().narrow(np.ones(65536, np.float32), np.empty(65536, np.uint16))
assert "onnxruntime" not in sys.modules
"""


def test_a_process_without_onnxruntime_does_not_import_it():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_a_codec_is_made_once():
    spec = flat(5)
    assert Codecs(spec, CASTS.stage).make("float16") is Codecs(spec, CASTS.stage).make("float16")
